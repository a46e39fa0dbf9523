"""The needle probe: its prompts, its responses on every layout, and what it draws."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.needle.__main__ import main
from examples.needle.probe import NeedleResult, Response, prepare_probe, run_probe
from examples.needle.prompts import Cell, Haystack, NeedleConfig, is_right
from tests.harness.ranks import RankPool
from tests.usp.tiny import drawn_model
from tests.usp.train.test_trainer import launch_of_pool
from usp.data.documents import read_pieces
from usp.data.sources import find_files
from usp.data.tokenizer import ByteTokenizer
from usp.hf.export import save_weights
from usp.hf.models import load_model_config

CONFIG = NeedleConfig(lengths="200,320", depths="0,60,100", samples=1, max_new_tokens=3, tokenizer="bytes")
TEXT = "The grass is green. The sky is blue.\nHere we go! There and back again."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "deep"
    config = load_model_config("tiny")
    config.num_hidden_layers, config.max_position_embeddings = 4, 320
    save_weights(dict(drawn_model(config).named_parameters()), folder, config=config)
    return folder


# Prompts


def haystack(**flags: Any) -> Haystack:
    return Haystack(replace(NeedleConfig(), **flags), ByteTokenizer(), [TEXT], 400)


@pytest.mark.parametrize("depth", [0, 33, 100])
@pytest.mark.parametrize("length", [180, 399])
def test_a_prompt_has_its_length_and_its_needle_at_its_depth(length: int, depth: float) -> None:
    prompt = haystack().prompt(Cell(length, depth, 0))
    text = ByteTokenizer().decode(prompt.ids)
    assert len(prompt.ids) + len(prompt.answer_ids) == length
    needle = f"\nThe pass key is {prompt.answer}. Remember it: {prompt.answer} is the pass key.\n"
    before, after = text.split(needle)
    hay, question = after.split("\nWhat is the pass key?")
    assert question == " The pass key is" and len(prompt.answer) == 5
    longest = max(map(len, TEXT.split(". ")))
    assert abs(len(before) - depth / 100 * len(before + hay)) <= longest
    assert before == "" or before.endswith((". ", "\n", "! ", "again.")) or depth == 100  # no sentence is interrupted
    assert (before == "") == (depth == 0) and (hay == "") == (depth == 100)


def test_prompts_differ_by_sample_and_seed_alone() -> None:
    first, again = (haystack().prompt(Cell(300, 50, 0)) for _ in range(2))
    assert np.array_equal(first.ids, again.ids) and first.answer == again.answer
    others = [haystack().prompt(Cell(300, 50, 1)), haystack(seed=1).prompt(Cell(300, 50, 0))]
    assert len({first.answer, *(other.answer for other in others)}) == 3


def test_a_fixed_needle_has_no_key() -> None:
    made = haystack(needle="Cats sleep on Mondays.", question="When do cats sleep? On", answer=" Mondays")
    prompt = made.prompt(Cell(200, 0, 0))
    assert ByteTokenizer().decode(prompt.ids).startswith("\nCats sleep on Mondays.\n") and prompt.answer == "Mondays"


def test_a_response_is_right_if_it_has_the_answer_as_words() -> None:
    assert is_right(" 12345. And", "12345") and is_right("on mondays", "Mondays") and is_right("$5!", "$5")
    assert not is_right("123456", "12345") and not is_right("", "12345")


# Responses


LAYOUTS: list[dict[str, Any]] = [
    {"sp_ulysses": 2, "sp_ring": 2},
    {"sp_ring": 2, "sp_layout": "striped", "tp": 2},
    {"sp_ulysses": 2, "pp": 2, "sp_layout": "contiguous"},
    {},
]


def probes(configs: list[NeedleConfig]) -> list[NeedleResult]:
    return [run_probe(prepare_probe(config, launch_of_pool())) for config in configs]


@pytest.mark.exhaustive  # generation: tests/usp/rlhf/generation
def test_responses_are_those_of_plain_transformers_on_every_layout(ranks: RankPool, model: Path) -> None:
    """Also where a data-parallel rank has no prompt of a length."""
    config = replace(CONFIG, model=str(model))
    expected = plain_responses(config)
    for found in ranks.run(probes, 4, [replace(config, **layout) for layout in LAYOUTS]):
        for result in found:
            assert [(one.length, one.depth, one.sample, one.response) for one in result.responses] == list(expected)
            assert [one.logprob for one in result.responses] == pytest.approx(list(expected.values()), rel=1e-5)


def plain_responses(config: NeedleConfig) -> dict[tuple[int, float, int, str], float]:
    """Return the log-probability of each answer, by cell and response."""
    model, tokenizer, found = drawn_model(load_model_config(config.model)), ByteTokenizer(), {}
    pieces = (piece for file in find_files("stdlib").files for piece, _ in read_pieces(file, "text"))
    made = Haystack(config, tokenizer, map(str, pieces), 320)
    for cell in (Cell(length, depth, 0) for length in (200, 320) for depth in (0, 60, 100)):
        prompt = made.prompt(cell)
        ids, response = torch.from_numpy(prompt.ids), list[int]()
        with torch.no_grad():
            whole = torch.cat((ids, torch.from_numpy(prompt.answer_ids)))
            logprobs = model(input_ids=whole[None]).logits[0].double().log_softmax(-1)
            while len(response) < 3:
                grown = torch.cat((ids, torch.tensor(response, dtype=torch.int64)))
                response.append(int(model(input_ids=grown[None]).logits[0, -1].argmax()))
        places = torch.arange(len(ids) - 1, len(whole) - 1)
        key = (cell.length, cell.depth, cell.sample, tokenizer.decode(response))
        found[key] = logprobs[places, whole[places + 1]].sum().item()
    return found


# The command


@pytest.mark.exhaustive
def test_the_command_draws_what_it_found(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "map.png"
    flags = ["--tokenizer", "bytes", "--lengths", "200,320", "--depths", "0,50", "--samples", "1", "--mark", "200"]
    assert main([str(model), *flags, "--out", str(out), "--no-logprobs"], {}) == 0
    shown = capsys.readouterr().out
    assert "200 tokens: " in shown and ["depth", "200", "320"] in map(str.split, shown.splitlines())
    assert f"heat map: {out}" in shown
    assert out.read_bytes().startswith(b"\x89PNG")
    result = json.loads(out.with_suffix(".json").read_text())
    assert [(cell["length"], cell["depth"]) for cell in result["cells"]] == [(200, 0), (200, 50), (320, 0), (320, 50)]
    assert result["cells"][0]["answer_logprob"] is None and len(result["cells"][0]["responses"]) == 1


def test_its_help_says_what_it_writes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"], {})
    assert "a file that ends in .png" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_scores_are_parts_of_the_responses() -> None:
    found = [
        Response(n, depth, i, "1", "1", n + i < 12, -2.0 * i) for n in (10, 11) for depth in (0.0, 50.0) for i in (0, 1)
    ]
    result = NeedleResult({}, tuple(found))
    assert (result.score(10), result.score(11), result.score()) == (1.0, 0.5, 0.75)
    assert result.to_json()["cells"][3] | {"responses": []} == {
        "length": 11, "depth": 50.0, "score": 0.5, "answer_logprob": -1.0, "responses": []
    }  # fmt: skip
    assert result.table().rows[-1] == ("all", "100", "50")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lengths", "1K"], "--lengths 1024 is beyond the model's max_position_embeddings=320"),
        (["--lengths", "50"], "a length of 50 tokens is too short: needle, question and answer have 1"),
        (["--lengths", "9x,20"], "--lengths = 9x,20: 9x must be a number of tokens"),
        (["--depths", "0,101"], "--depths = 0,101: 101 must be from 0 to 100 percent"),
        (["--needle", "A key."], "--answer = ' {key}' has a {key} that --needle = 'A key.' does not tell"),
        (["--answer", "pass key"], "already contains --answer"),
        (["--samples", "0"], "--samples = 0 must be at least 1"),
        (["--sp-ring", "2"], "--sp-ring 2 = 2 ranks must divide the world size 1"),
        (["--data", "nowhere"], "--data nowhere does not exist"),
        (["--rope-scaling", "yarn", "--lengths", "320"], "--rope-scaling yarn is not used"),
        (["--beyond-limit"], "of --lengths, 320, and the model has max_position_embeddings=320"),
    ],
)
@pytest.mark.slow(but=3)
def test_wrong_flags_are_refused(model: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    assert main([str(model), "--tokenizer", "bytes", *flags], {}) == 2
    assert said in capsys.readouterr().err

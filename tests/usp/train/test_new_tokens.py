"""Added tokens: rows as transformers' resize_token_embeddings makes them, on every layout, and exports that agree."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from tests.harness.ranks import RankPool
from tests.usp.data.chat_templates import FAMILIES, write_tokenizer
from tests.usp.tiny import drawn_model
from tests.usp.train.test_lora import load, run, steps_of
from tests.usp.train.test_trainer import launch_of_pool
from usp.__main__ import main
from usp.config import TrainConfig
from usp.hf.export import save_weights
from usp.hf.models import load_model_config
from usp.hf.tokenizers import load_tokenizer
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.train.prepare import prepare
from usp.train.trainer import Trainer

TOKENS = "<|call|>,<|result|>"
ROWS = 320  # the next multiple of 64
SMALL = TrainConfig(seq_len=64, steps=2, warmup_steps=1, batch_size=4, adam_eps=1e-4, learning_rate=1e-2, device="cpu")
SMALL = replace(SMALL, add_tokens=TOKENS, parse_special_tokens=True, hang_timeout=0)
TP2_U2: dict[str, Any] = {"tp": 2, "sp_ulysses": 2}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model whose vocabulary is that of its tokenizer, and data with tokens that it lacks."""
    folder = tmp_path_factory.mktemp("base")
    write_tokenizer(folder / "model", next(iter(FAMILIES)))
    config = load_model_config("qwen3-tiny")
    config.tie_word_embeddings, config.vocab_size = request.param, len(AutoTokenizer.from_pretrained(folder / "model"))
    save_weights(dict(drawn_model(config).named_parameters()), folder / "weights", config=config)
    for file in (folder / "weights").iterdir():
        file.rename(folder / "model" / file.name)
    rows = ({"text": f"answer <|call|> {number} <|result|> assistant"} for number in range(200))
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config_of(base: Path, output: Path, **flags: Any) -> TrainConfig:
    files = {"model": str(base / "model"), "data": str(base / "data.jsonl"), "data_cache": str(base / "cache")}
    return replace(SMALL, **files, output=str(output), **flags)


def resized(base: Path) -> PreTrainedModel:
    tokenizer, model = AutoTokenizer.from_pretrained(base / "model"), load(base / "model")
    tokenizer.add_tokens(TOKENS.split(","), special_tokens=True)
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)
    return model


def first_ends(config: TrainConfig) -> dict[str, torch.Tensor]:
    """The embedding and the output head that a run begins with."""
    state = Trainer(prepare(config, launch_of_pool())).state()
    found = {name.removeprefix("model."): x for name, x in state.items() if "embed_tokens" in name or "lm_head" in name}
    return {name: x.full_tensor() for name, x in found.items() if not name.startswith("optimizer.")}


@pytest.mark.slow(full=1)
def test_new_rows_are_those_of_resize_token_embeddings(ranks: RankPool, base: Path, tmp_path: Path) -> None:
    wanted, rows = resized(base), AutoConfig.from_pretrained(base / "model").vocab_size
    for layout in (TP2_U2, {}):  # with four parts of the vocabulary and with eight
        for ends in ranks.run(first_ends, 4, config_of(base, tmp_path, **layout)):
            assert len(ends) == 1 + (not wanted.config.tie_word_embeddings)
            for name, weight in ends.items():
                expected = wanted.get_parameter(name).detach()
                assert torch.equal(weight[:rows], expected[:rows])
                torch.testing.assert_close(weight[rows:], expected[rows:], rtol=0, atol=5e-6)  # of transformers' noise
                assert expected[rows:].abs().max() > 1e-4


@pytest.mark.slow
def test_steps_do_not_depend_on_the_layout_and_the_exported_tokenizer_fits(
    ranks: RankPool, base: Path, tmp_path: Path
) -> None:
    ranks.run(run, 4, config_of(base, tmp_path / "four", batch_size=4, **TP2_U2))
    ranks.run(run, 1, config_of(base, tmp_path / "one"))
    assert (steps_of(tmp_path / "four") / steps_of(tmp_path / "one") - 1).abs().max() <= 1e-5
    model, tokenizer = load(tmp_path / "four" / "model"), AutoTokenizer.from_pretrained(tmp_path / "four" / "model")
    ids = tokenizer.convert_tokens_to_ids(TOKENS.split(","))
    rows = AutoConfig.from_pretrained(base / "model").vocab_size
    assert ids == [rows, rows + 1] and model.config.vocab_size == ROWS
    assert tokenizer("a<|call|>", add_special_tokens=False)["input_ids"][-1] == rows
    embedding = model.get_input_embeddings().weight
    assert (embedding[rows] - embedding[rows + 2]).abs().max() > 1e-3  # one of the data, the other padding

    again = prepare(config_of(base, tmp_path / "one", steps=3, resume="auto"), Launch())
    assert again.saved is not None and again.model_config.vocab_size == ROWS
    with pytest.raises(ConfigurationError, match="vocab_size"):
        prepare(config_of(base, tmp_path / "one", steps=3, resume="auto", add_tokens=""), Launch())


@pytest.mark.slow
def test_adapters_of_new_tokens_come_with_the_rows(ranks: RankPool, base: Path, tmp_path: Path) -> None:
    config = config_of(base, tmp_path / "run", lora_rank=4, lora_merge=True)
    with pytest.raises(ConfigurationError, match="give --lora-modules-to-save embed_tokens,lm_head"):
        prepare(config, Launch())
    ranks.run(run, 2, replace(config, lora_modules_to_save="embed_tokens,lm_head", batch_size=2))
    rows = AutoConfig.from_pretrained(base / "model").vocab_size
    adapted, ids = (
        PeftModel.from_pretrained(resized(base), tmp_path / "run" / "adapter"),
        torch.tensor([[5, rows, rows + 1]]),
    )
    torch.testing.assert_close(load(tmp_path / "run" / "model")(ids).logits, adapted(ids).logits, rtol=1e-5, atol=1e-5)
    assert AutoConfig.from_pretrained(tmp_path / "run" / "adapter").vocab_size == ROWS


def test_the_tokenizer_is_read_once_and_a_store_with_the_tokens_is_trained_on(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, loaded = config_of(base, tmp_path), AutoTokenizer.from_pretrained
    read = list[Path]()
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda folder, **rest: read.append(folder) or loaded(folder, **rest)
    )
    (source,) = prepare(config, Launch()).begins_in.batches.packed.sources
    assert read == [base / "model"]
    flags = ["tokenize", "--data", config.data, "--tokenizer", config.model, "--output", str(tmp_path / "store")]
    assert main([*flags, "--add-tokens", TOKENS, "--parse-special-tokens"]) == 0
    (stored,) = prepare(replace(config, data=str(tmp_path / "store")), Launch()).begins_in.batches.packed.sources
    assert np.array_equal(stored.store.read(0, 99), source.store.read(0, 99))
    rows = AutoConfig.from_pretrained(base / "model").vocab_size
    assert {rows, rows + 1} <= set(stored.store.read(0, 99).tolist())


def test_tokens_come_from_a_file_and_those_that_are_there_stay(base: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens.txt").write_text("<|call|>\n\n<|a,b|>\n")
    model = str(base / "model")
    before, after = load_tokenizer(model), load_tokenizer(model, add_tokens=str(tmp_path / "tokens.txt"))
    assert after.vocab_size == before.vocab_size + 2 and before.fingerprint != after.fingerprint
    assert load_tokenizer(model, add_tokens=before.show([before.eos or 0])).vocab_size == before.vocab_size
    for asked, said in (
        ({"tokenizer": "bytes"}, "the byte tokenizer gets none"),
        ({"add_tokens": ","}, "names no tok"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            prepare(config_of(base, tmp_path / "run", **asked), Launch())

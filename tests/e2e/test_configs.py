"""The files of configs/: each passes every rule for the ranks that its comment starts, fits into their memory, and a
small copy of it takes two steps on CPUs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig

from tests.e2e.processes import ROOT, run_here
from tests.harness.ranks import RankPool
from tests.usp.tiny import drawn_model
from tests.usp.train.test_vision import chats, tokenizer_of, write_images, write_model
from usp.commands.flags import parse
from usp.config import TrainConfig
from usp.hf.export import save_weights
from usp.hf.models import load_model_config, read_config, scalar_config, with_layers
from usp.parallel import load_hardware
from usp.planning.run_plan import question_of
from usp.planning.simulator import Simulator
from usp.planning.step_report import step_report
from usp.predict.devices import usable
from usp.predict.job import ONE_DOCUMENT
from usp.predict.memory import largest_footprint
from usp.rlhf.config import RlhfConfig
from usp.rlhf.prepare import PreparedRlhf, prepare
from usp.run.launch import Launch
from usp.run.tables import GIB
from usp.train.dry_run import dry_run
from usp.train.resolve import job_of, resolve

FILES = {path.stem: path for path in sorted((ROOT / "configs").glob("*.yaml"))}
H100 = load_hardware("h100")
COMMAND = re.compile(r"torchrun (?:--nnodes (\d+) )?--nproc-per-node (\d+) .*?(train|rlhf)\.py --config (\S+)")

# By the folder that a file names: the preset of the released model, and what differs; or the whole configuration.
RELEASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Llama-3.1-8B": ("llama3-8b", {"max_position_embeddings": 2**17}),
    "Llama-3.1-70B": ("llama3-70b", {"max_position_embeddings": 2**17}),
    "Meta-Llama-3-8B": ("llama3-8b", {}),
    "Qwen3-30B-A3B-Base": ("qwen3-30b-a3b", {}),
    "Qwen3-8B": ("qwen3-8b", {}),
    "Qwen3-8B-reward": ("qwen3-8b", {}),
    "Qwen2.5-VL-7B-Instruct": ("qwen2-7b", {}),  # its text model
    "SmolLM2-135M-Instruct": (
        "tiny",
        {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
        | {"num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192}
        | {"tie_word_embeddings": True},
    ),
}
ENCODER = 0.68e9  # parameters of the encoder of Qwen2.5-VL-7B and its projector
# Small models with as many heads as the degrees of the copies need, and a window for context-extension to extend.
SMALL = {"Qwen3-30B-A3B-Base": "qwen3-moe-tiny", "Qwen3-8B": "qwen3-tiny", "Qwen3-8B-reward": "qwen3-tiny"}
SHORT = ["--seq-len", "256", "--steps", "2", "--train-tokens", "0"]
FEW = ["--steps", "2", "--prompts", "4", "--checkpoint-every", "0"]
DECODED, OWN = [*FEW, "--max-new-tokens", "4"], ["--rollout-engine", "own", "--rollout-cache", "1"]
# By file: the ranks of the copy, and what differs from the file.
COPIES: Mapping[str, tuple[int, list[str]]] = {
    "qwen3-30b-a3b-moe": (4, [*SHORT, "--ep", "4", "--global-batch-size", "2"]),
    "vision-chats": (4, [*SHORT, "--sp-ulysses", "2"]),
    "ppo-reward-model": (2, DECODED),
    # with --exhaustive
    "lora-one-gpu": (1, SHORT),
    "context-extension": (4, [*SHORT, "--sp-ulysses", "4", "--seq-len", "512"]),
    "sft-laptop": (1, SHORT),
    "llama3-8b-128k": (4, [*SHORT, "--sp-ulysses", "4"]),
    "llama3-70b-32k": (4, [*SHORT, "--sp-ulysses", "2", "--global-batch-size", "8"]),
    "dpo": (2, FEW),
    "grpo-vllm": (2, [*DECODED, *OWN, "--group-size", "2", "--eval-every", "2", "--eval-prompts", "2"]),
}


def started(name: str) -> tuple[str, int]:
    """Return the program and the number of ranks of the command in the comment that a file begins with."""
    text = re.split(r"^[^#]", FILES[name].read_text(), maxsplit=1, flags=re.MULTILINE)[0]
    assert 3 <= len(text.splitlines()) <= 6
    assert "Hardware: " in text and "Change first: " in text
    found = COMMAND.search(text)
    assert found and found[4] == f"configs/{name}.yaml"
    return found[3], int(found[1] or 1) * int(found[2])


def released(folder: str) -> PretrainedConfig:
    preset, changes = RELEASES[folder]
    config = load_model_config(preset)
    config.update(dict(changes))
    return scalar_config(config) if folder.endswith("-reward") else config


def write_data(folder: Path, repeated: int = 1) -> None:
    """Write the data that files name: chats, with images too, documents, problems and preferences. repeated: the words
    of problems and preferences."""
    (data := folder / "data").mkdir()
    texts = [" ".join(f"{word} {number}" for number in range(60)) for word in ("one", "two", "three", "four")]
    messages = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes " * 20}] for n in range(99)
    ]
    rows = {
        "chats": [{"messages": each} for each in messages],
        "chats-with-images": [{"messages": each} for each in chats()],
        "problems": [{"prompt": f"{n} + 1 = " * repeated, "answer": str(n + 1)} for n in range(200)],
        "prompts": [{"prompt": f"{n} + 1 = " * repeated} for n in range(200)],
        "preferences": [{"prompt": f"{n}?", "chosen": "good" * repeated, "rejected": "bad"} for n in range(200)],
    }
    for name, listed in rows.items():
        (data / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in listed))
    write_images(data)
    for name in ("documents", "long-documents"):
        (data / name).mkdir()
        for number, text in enumerate(texts):
            (data / name / f"{number}.txt").write_text(text * 20)


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as the files expect, of models without weights, whose tokenizers have a few tokens."""
    folder = tmp_path_factory.mktemp("releases")
    write_data(folder, repeated=100)
    for name in RELEASES:
        released(name).save_pretrained(folder / "models" / name)
        tokenizer_of("qwen2_5_vl").save_pretrained(folder / "models" / name)
        save_file({}, folder / "models" / name / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as the files expect, of small models with random weights."""
    folder = tmp_path_factory.mktemp("small")
    write_data(folder)
    for name in RELEASES:
        path = folder / "models" / name
        if name.startswith("Qwen2.5-VL"):
            write_model(path, "qwen2_5_vl")
            continue
        config = load_model_config(SMALL.get(name, "tiny"))
        if name == "Meta-Llama-3-8B":
            config.max_position_embeddings = 32  # a sixteenth of the copy's length, as 8K is of 128K
        if name.endswith("-reward"):
            AutoModelForSequenceClassification.from_config(scalar_config(config)).save_pretrained(path)
        else:
            save_weights(dict(drawn_model(config).named_parameters()), path, config=config)
        tokenizer_of("qwen2_5_vl").save_pretrained(path)
    return folder


def test_there_are_ten_and_a_copy_of_each() -> None:
    assert len(FILES) == 10 and FILES.keys() == COPIES.keys()


@pytest.mark.parametrize("name", FILES)
def test_a_file_names_its_run_and_every_option_has_an_effect(name: str) -> None:
    program, _ = started(name)
    kind = TrainConfig if program == "train" else RlhfConfig
    config = parse(["--config", str(FILES[name])], kind)
    given = yaml.safe_load(FILES[name].read_text())
    assert {"model", "data", "output"} <= given.keys() and given["output"] == f"runs/{name}"
    assert not config.without_effect().keys() & given.keys()


TRAINED = [name for name in FILES if started(name)[0] == "train"]
ALIGNED = [name for name in FILES if name not in TRAINED]


@pytest.mark.parametrize("name", [name for name in TRAINED if "lora" not in name])
def test_a_training_fits(name: str, releases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(releases)
    config, world = parse(["--config", str(FILES[name])], TrainConfig), started(name)[1]
    device = 8 * GIB if config.device == "cpu" else usable(H100).device
    found = resolve(config, world)
    assert not found.problems
    if name == "vision-chats":
        axes = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
        text = {name: value for name, value in read_config(config.model).to_dict().items() if name != "model_type"}
        vision = AutoConfig.for_model("qwen2_5_vl", text_config=text | axes)
        assert not resolve(config, world, vision, images=True).problems
        device -= 16 * ENCODER / world
    if config.device == "cpu":
        assert found.model_config
        assert largest_footprint(job_of(found.config, found.model_config, world))[0].peak.total < device
    else:
        report = step_report(config, world, H100, lambda _: ONE_DOCUMENT)
        assert report.memory.peak.total < device and report.on_host <= report.limits.host
        assert 1 < report.time.total < 60 and report.time.mfu > 0.2


@pytest.mark.slow
def test_adapters_fit_by_dry_runs_of_few_layers(releases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer adds to the peak of a micro-batch is the same for each."""
    monkeypatch.chdir(releases)
    config = parse(["--config", str(FILES["lora-one-gpu"])], TrainConfig)
    assert not resolve(config, started("lora-one-gpu")[1]).problems
    folder, whole, peaks = Path(config.model), read_config(config.model), list[int]()
    for layers in (1, 2):
        few = folder.with_name(f"{folder.name}-{layers}")
        with_layers(whole, layers).save_pretrained(few)
        peaks.append(dry_run(replace(config, model=str(few), batch_size=1, micro_batches=1), 1).peak_bytes)
    peak = peaks[0] + (whole.num_hidden_layers - 1) * (peaks[1] - peaks[0])
    assert 16 * GIB < peak < usable(replace(H100, memory_bytes=int(40e9))).device


@pytest.mark.parametrize("name", ALIGNED)
@pytest.mark.slow(but=1)
def test_a_step_of_rlhf_fits(name: str, releases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(releases)
    monkeypatch.setattr("usp.rlhf.generation.vllm.find_spec", lambda package: package)  # as where it is installed
    file, world = parse(["--config", str(FILES[name])], RlhfConfig), started(name)[1]
    config = replace(file, device="cpu", dtype="bfloat16")  # checked as on a CPU: there may be no other device here
    run: PreparedRlhf = prepare(config, Launch(world_size=world, local_world_size=world))
    question = question_of(replace(run, config=replace(run.config, hardware="h100")))
    step = Simulator(question.graph, question.estimates, world).run(run.plan)
    assert 0.5 < step.seconds < 300 and step.peak_bytes < usable(H100).device
    if config.rollout_engine == "vllm":  # which holds a whole copy, and its cache, while training's shards wait
        held = 2 * question.models["actor"].numel + config.rollout_cache * GIB
        assert held + 4 * question.models["actor"].numel / world < usable(H100).device


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.slow(full=3)
def test_a_small_copy_takes_two_steps(name: str, ranks: RankPool, small: Path) -> None:
    (world, changes), (program, _) = COPIES[name], started(name)
    cache = ["--data-cache", str(small / "cache")] if program == "train" else []
    ended = ranks.run(run_here, world, program, ["--config", str(FILES[name]), *changes, *cache], small)[0]
    records = [json.loads(line) for line in (small / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2] and "step 2/2" in ended.out
    losses = [value for each in records for name, value in each.items() if name.endswith("loss") and value is not None]
    assert len(losses) >= 2 and all(map(math.isfinite, losses))
    assert list((small / "runs" / name / ("adapter" if "lora" in name else "model")).glob("*.safetensors"))

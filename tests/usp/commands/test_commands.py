"""Flags, configuration files, help, launches and endings."""

from __future__ import annotations

import math
import re
import socket
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from usp.commands.flags import parse
from usp.commands.time import TimeConfig
from usp.commands.train import main
from usp.config import UNPREDICTED, TrainConfig
from usp.parallel import RanksDisagree
from usp.run.failures import ConfigurationError, Ending, TrainingDiverged, end, ending_of, reachable_store
from usp.run.launch import Launch, choose_device, set_library_defaults
from usp.train.checkpoints import find_start

CASES: list[tuple[str, str, list[str], TrainConfig]] = [  # a file, its text, flags, and what they make
    ("", "", [], TrainConfig()),
    (
        "",
        "",
        ["--sp-ulysses", "4", "--sp-ring=2", "--output", "out"],
        TrainConfig(sp_ulysses=4, sp_ring=2, output="out"),
    ),
    ("a.yaml", "sp-ring: 2\nlearning-rate: 3e-4\n", [], TrainConfig(sp_ring=2, learning_rate=3e-4)),
    ("a.yml", "sp_ring: 2\n", ["--sp-ring", "8"], TrainConfig(sp_ring=8)),
    ("a.toml", "sp-ring = 2\nlearning-rate = 3e-4", [], TrainConfig(sp_ring=2, learning_rate=3e-4)),
    ("a.yaml", "engine: fsdp2\nlora_dora: false\n", [], TrainConfig()),  # what is always done
    ("a.yaml", "", [], TrainConfig()),
    ("a.yaml", yaml.safe_dump(asdict(TrainConfig(max_grad_norm=math.inf))), [], TrainConfig(max_grad_norm=math.inf)),
]


@pytest.mark.parametrize(("name", "text", "flags", "expected"), CASES)
@pytest.mark.slow(but=3)
def test_flags_override_a_file(tmp_path: Path, name: str, text: str, flags: list[str], expected: TrainConfig) -> None:
    (file := tmp_path / (name or "unused")).write_text(text)
    assert parse([*flags, *([f"--config={file}"] if name else [])], TrainConfig) == expected
    if name:
        assert parse(["--config", str(file), *flags], TimeConfig).sp_ring == expected.sp_ring


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "sp-rings: 2", r"unknown key 'sp-rings' \(did you mean 'sp_ring'\?\)"),
        ("a.yaml", "engine: deepspeed", "engine = 'deepspeed' is gone, and only 'fsdp2' is supported: remove the key"),
        ("a.yaml", "- 1", "expected a mapping of keys to values, got a list"),
        ("a.yaml", "a: [", "while parsing"),
        ("a.yaml", "steps: 1\nsp-ring: 2\nsteps: 3", r"'steps' is given twice\n.*line 3, column 1"),
        ("a.toml", "sp-ring =", "[Ii]nvalid value"),
        ("a.json", "{}", r"expected a .yaml, .yml or .toml file, got '.json'"),
        ("a.yaml", None, "no such file"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        parse(["--config", str(tmp_path / name)], TrainConfig)


@pytest.mark.parametrize(("kind", "without"), [(TrainConfig, ()), (TimeConfig, UNPREDICTED)])
def test_help_names_the_flags_that_have_an_effect(
    kind: type[TrainConfig], without: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for shows in (False, True):
        with pytest.raises(SystemExit) as stop:
            parse(["--help"], kind, without=without, show_help=shows)
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        assert bool(shown) == shows
    for name in [*asdict(kind()), "config"]:
        named = bool(re.search(f"--{name.replace('_', '-')}[ ,]", shown))
        assert named == (name == "hardware" or name not in without), name  # a prediction has its own --hardware
    assert "llama3-8b" in shown and "{contiguous,zigzag,striped,balanced,auto}" in shown
    (tmp_path / "run.yaml").write_text("seed: 3\nsp_ring: 2\n")  # a file has them all
    read = parse(["--sp-ulysses", "4", "--config", str(tmp_path / "run.yaml")], kind, without=without)
    assert read == kind(seed=3, sp_ring=2, sp_ulysses=4)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--sp-ulises", "4"], r"Unrecognized options: --sp-ulises(.|\n)*--sp-ulysses INT"),
        (["--steps", "ten"], r"--steps: invalid literal for int\(\) with base 10: 'ten'"),
        (["--steps"], "--steps"),
        (["--config"], "--config"),
        (["--config", "--steps", "3"], "--config"),
    ],
)
def test_a_wrong_flag_is_refused(capsys: pytest.CaptureFixture[str], args: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse(args, TrainConfig)
    assert capsys.readouterr().err == ""


def test_a_refused_configuration_exits_with_2_and_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error_file = tmp_path / "error.json"
    assert main(["--config", "nowhere.yaml"], {"TORCHELASTIC_ERROR_FILE": str(error_file)}) == 2
    assert capsys.readouterr().err == "error: --config nowhere.yaml: no such file\n"
    assert "nowhere.yaml: no such file" in error_file.read_text()


def test_a_launch_is_read_from_the_environment() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "3"}
    assert Launch.from_environment(environ) == Launch(5, 8, 1, 4, threads=3, rendezvous=True)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert Launch.from_environment(environ | agent).agent_store == ("localhost", 29500)
    own = Launch.from_environment({**environ, **agent, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert own.own_store and not Launch.from_environment(environ | agent).own_store
    with pytest.raises(
        ValueError, match=r"torchrun shares no store \(TORCH_DISABLE.*: give --output and --resume auto"
    ):
        find_start(TrainConfig(), own)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = free.getsockname()
    first, other = (replace(own, rank=rank, agent_store=address) for rank in (0, 1))
    assert reachable_store(other) is None  # nobody serves it
    held, store = first.store(), reachable_store(other)
    assert held is not None and store is not None
    other.remember("key", "value")
    assert first.recall("key") == "value"
    del held
    with pytest.raises(dist.DistError):
        store.add("key", 1)


def test_without_a_launcher_one_process_uses_all_cores() -> None:
    alone = Launch.from_environment({})
    assert (alone.rank, alone.world_size, alone.rendezvous) == (0, 1, False)
    assert Launch.from_environment({"OMP_NUM_THREADS": "1"}).threads == 1
    many = {"RANK": "0", "WORLD_SIZE": "999", "LOCAL_WORLD_SIZE": "999", "OMP_NUM_THREADS": "1"}
    assert Launch.from_environment(many).threads == 1


FOUR = Launch(3, 4, 3, 4, rendezvous=True)


@pytest.mark.parametrize(
    ("gpus", "asked", "launch", "found"),
    [
        (0, "cuda", Launch(), r"--device cuda: torch sees no GPU on this host: install .* or use --device cpu"),
        (0, "auto", Launch(), "cpu"),
        (2, "auto", FOUR, "4 processes on this host need a GPU each, but torch sees 2"),
        (2, "cpu", FOUR, "cpu"),
        (2, "cuda", Launch(3, 4, 1, 2), "cuda:1"),
        (1, "auto", FOUR, "cuda:0"),  # which it alone sees
        (1, "auto", replace(FOUR, run_id="none"), "torch sees 1"),  # torchrun shows all GPUs to every process
    ],
)
def test_a_process_takes_its_device(
    monkeypatch: pytest.MonkeyPatch, gpus: int, asked: str, launch: Launch, found: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    if " " not in found:
        assert str(choose_device(asked, launch)) == found
        return
    with pytest.raises(ValueError, match=found):
        choose_device(asked, launch)


def test_libraries_have_defaults_that_the_environment_overrides() -> None:
    environ: dict[str, str] = {}
    set_library_defaults(Launch(0, 4, 0, 2), environ)
    assert environ == {"PYTORCH_ALLOC_CONF": "expandable_segments:True,pinned_max_round_threshold_mb:64"}
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native", "GLOO_SOCKET_IFNAME": "eth0"}
    set_library_defaults(Launch(0, 4, 0, 4), before := dict(environ))
    assert before == environ


@pytest.mark.parametrize(
    ("error", "exit_code", "said"),
    [
        (ConfigurationError("no"), 2, "error: no"),
        (TrainingDiverged("nan"), 1, "error: nan"),
        (RanksDisagree("data"), 1, "error: data"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("Connection closed by peer [127.0.0.1]:1"), 1, "lost its connection"),
        (RuntimeError("shapes differ"), 1, "rank 3 failed: RuntimeError: shapes differ"),
        (ValueError("Connection closed by peer"), 1, "ValueError: Connection closed"),
    ],
)
def test_how_a_rank_ends(error: BaseException, exit_code: int, said: str) -> None:
    ending = ending_of(error, rank=3)
    assert ending.exit_code == exit_code
    assert said in ending.message


@pytest.mark.slow
def test_only_the_first_failure_of_an_attempt_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("usp.run.failures.LAUNCHER_SECONDS", 0.5)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    agent = {"agent_store": ("localhost", store.port)}
    for rank, attempt, found, said in (
        (2, 0, agent, "2"),
        (0, 0, agent, ""),
        (1, 0, agent, ""),
        (1, 1, agent, "1"),
    ):
        assert end(Ending(f"{rank}", 1), Launch(rank, 4, attempt=attempt, **found), None) == 1
        assert capsys.readouterr().err == (said and said + "\n")


def test_without_a_store_every_rank_prints_in_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    assert [end(Ending(f"rank {rank}", 1), Launch(rank, 2), None) for rank in (0, 1)] == [1, 1]
    assert capsys.readouterr().err == "rank 0\nrank 1\n" and len(waited) == 1

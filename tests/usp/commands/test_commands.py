"""Flags, configuration files, help, launches and endings."""

from __future__ import annotations

import re
import socket
from dataclasses import asdict, replace
from pathlib import Path

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


def test_no_flags_are_the_defaults() -> None:
    assert parse([], TrainConfig) == TrainConfig()


def test_flags_set_fields() -> None:
    config = parse(["--sp-ulysses", "4", "--sp-ring=2", "--learning-rate", "1e-4", "--output", "out"], TrainConfig)
    assert config == TrainConfig(sp_ulysses=4, sp_ring=2, learning_rate=1e-4, output="out")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "sp-ring: 2\nlearning-rate: 3e-4\n"),
        ("run.yml", "sp_ring: 2\nlearning_rate: 0.0003\n"),
        ("run.toml", "sp-ring = 2\nlearning-rate = 3e-4\n"),
    ],
)
@pytest.mark.slow(but=1)
def test_flags_override_a_file(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert parse(["--config", str(file)], TrainConfig) == TrainConfig(sp_ring=2, learning_rate=3e-4)
    assert parse(["--sp-ring", "8", f"--config={file}"], TrainConfig) == TrainConfig(sp_ring=8, learning_rate=3e-4)


def test_a_saved_configuration_can_be_loaded(tmp_path: Path) -> None:
    config = TrainConfig(sp_ulysses=2, max_grad_norm=float("inf"), learning_rate=1e-5)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(asdict(config)))
    assert parse(["--config", str(file)], TrainConfig) == config


def test_keys_that_say_what_is_always_done_are_read(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("engine: fsdp2\nlora_dora: false\nsp_ring: 2\n")
    for kind in (TrainConfig, TimeConfig):
        assert parse(["--config", str(tmp_path / "old.yaml")], kind).sp_ring == 2


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").touch()
    assert parse(["--config", str(tmp_path / "empty.yaml")], TrainConfig) == TrainConfig()


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


def test_help_names_every_field_and_preset(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(["--help"], TrainConfig)
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    for name in [*asdict(TrainConfig()), "config"]:
        assert re.search(f"--{name.replace('_', '-')}[ ,]", shown), name
    assert "llama3-8b" in shown and "{contiguous,zigzag,striped,balanced,auto}" in shown


def test_a_prediction_takes_the_flags_that_change_it_and_files_of_train_py(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"], TimeConfig, without=UNPREDICTED)
    shown = capsys.readouterr().out
    for name in asdict(TimeConfig()):  # its own --hardware is a flag
        assert bool(re.search(f"--{name.replace('_', '-')}[ ,]", shown)) == (
            name == "hardware" or name not in UNPREDICTED
        ), name
    (tmp_path / "run.yaml").write_text("seed: 3\nsp_ring: 2\n")
    read = parse(["--sp-ulysses", "4", "--config", str(tmp_path / "run.yaml")], TimeConfig, without=UNPREDICTED)
    assert read == TimeConfig(seed=3, sp_ring=2, sp_ulysses=4)


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


def test_help_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"], TrainConfig, show_help=False)
    assert capsys.readouterr().out == ""


def test_a_refused_configuration_exits_with_2_and_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "nowhere.yaml"], {}) == 2
    assert capsys.readouterr().err == "error: --config nowhere.yaml: no such file\n"


def test_the_error_is_written_for_torchrun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error_file = tmp_path / "error.json"
    main(["--config", "nowhere.yaml"], {"TORCHELASTIC_ERROR_FILE": str(error_file)})
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


def test_a_device_that_torch_does_not_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(
        ValueError, match=r"--device cuda: torch sees no GPU on this host: install .* or use --device cpu"
    ):
        choose_device("cuda", Launch())
    assert choose_device("auto", Launch()).type == "cpu"


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ValueError, match="4 processes on this host need a GPU each, but torch sees 2"):
        choose_device("auto", Launch(0, 4, 0, 4))
    assert choose_device("cpu", Launch(0, 4, 0, 4)).type == "cpu"
    assert choose_device("cuda", Launch(3, 4, 1, 2)).index == 1


def test_a_process_that_sees_only_its_own_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    launched = Launch(3, 4, 3, 4, rendezvous=True)
    assert choose_device("auto", launched).index == 0
    with pytest.raises(ValueError, match="torch sees 1"):  # torchrun shows all GPUs to every process
        choose_device("auto", replace(launched, run_id="none"))


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
    said = []
    for rank, attempt in ((2, 0), (0, 0), (1, 0), (1, 1)):
        launch = Launch(rank, 4, agent_store=("localhost", store.port), attempt=attempt)
        assert end(Ending(f"rank {rank}", 1), launch, None) == 1
        said.append(capsys.readouterr().err)
    assert said == ["rank 2\n", "", "", "rank 1\n"]


def test_without_a_store_every_rank_prints_in_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    for rank in (0, 1):
        end(Ending(f"rank {rank}", 1), Launch(rank, 2), None)
    assert capsys.readouterr().err == "rank 0\nrank 1\n"
    assert len(waited) == 1

"""Every bad input is refused on all ranks before any of them communicates, with a helpful message."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.e2e.processes import Run, refusals_of
from tests.usp.tiny import drawn_model
from usp.__main__ import main as tool
from usp.commands.train import main
from usp.data.sources import find_files
from usp.data.tokenizer import ByteTokenizer
from usp.data.tokenizing import write_store
from usp.hf.export import save_weights
from usp.hf.models import load_model_config
from usp.run import failures
from usp.run.launch import Launch

EIGHT = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}

BAD = refusals_of("""
--sp-ulysses 3 --seq-len 3000 => --sp-ulysses 3 | 3 ranks must divide the world size 8
--sp-ring 4 --dp-shard 4 => --dp-shard 4 x --sp-ring 4 = 16 ranks must equal the world size 8
--sp-ulysses 8 --model few-heads --tokenizer bytes => 4 query heads | --sp-ulysses 4 --sp-ring 2
--sp-layout zigzagg => --sp-layout = 'zigzagg' | contiguous, zigzag, striped, balanced | did you mean 'zigzag'?
--attention-kernel sdp => --attention-kernel = 'sdp' | did you mean 'sdpa'?
--model llama3-8 => --model llama3-8 | did you mean 'llama3-8b'?
--data missing.txt => data=missing.txt does not exist
--data empty => data=empty is empty
--data blank.jsonl => the data holds no text
--data field.jsonl => no key data_field='text' | it has 'body' | set data_field
--data half.jsonl.gz => half.jsonl.gz is damaged
--data chats.jsonl =>
    chats.jsonl, line 1: messages need a chat template |
    give --chat-template FILE, or for plain text under another key --data-field
--data damaged.tokens => tokens.bin is damaged | bytes 0 to 10 do not have their checksum
--data unfinished.tokens => unfinished.tokens is not finished | run the same `python -m usp tokenize`
--data damaged.tokens --bos always => --tokenizer bytes has no BOS
--data stdlib=0.5,empty => 'empty' must be PATH=WEIGHT
--data text.txt=0.5,empty=0.5 => data=empty is empty
--data '' => data='' names no data
--curriculum stages.yaml --sp-ring 2 => data=missing.txt does not exist
--model few-ids --tokenizer bytes => bytes has ids up to 383 | vocabulary of 200
--ep 3 --model noisy --steps 0 =>
    --steps = 0 | --ep 3 must divide | router_jitter_noise=0.1 | makes routing depend on the rank | set it to 0
--config wrong.yaml => --config wrong.yaml | unknown key 'sp-rings' (did you mean 'sp_ring'?)
--steps 0 --model nothing --data missing.txt => 3 problems: | --steps = 0 | --model nothing | data=missing.txt
""")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the rows above name."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "empty").mkdir()
    (folder / "blank.jsonl").write_text('\n{"text": ""}\n')
    (folder / "field.jsonl").write_text('{"body": "text"}\n')
    (folder / "chats.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a"}]}')
    (folder / "half.jsonl.gz").write_bytes(gzip.compress(b'{"text": "half"}' * 99)[:-9])
    (folder / "text.txt").write_text("text")
    for name in ("damaged", "unfinished"):
        write_store(find_files(str(folder / "text.txt")), "text", ByteTokenizer(), folder / f"{name}.tokens")
    (folder / "damaged.tokens" / "tokens.bin").write_bytes(bytes(10))
    (folder / "unfinished.tokens" / "manifest.json").rename(folder / "unfinished.tokens" / "progress.json")
    (folder / "wrong.yaml").write_text("sp-rings: 2\n")
    (folder / "stages.yaml").write_text("[{steps: 1}, {steps: 2, data: missing.txt}]")
    for name, preset, key, value in (
        ("few-heads", "tiny", "num_attention_heads", 4),
        ("few-ids", "tiny", "vocab_size", 200),
        ("noisy", "mixtral-tiny", "router_jitter_noise", 0.1),
    ):
        config = load_model_config(preset)
        setattr(config, key, value)
        model = drawn_model(config)
        save_weights(dict(model.named_parameters()), folder / name, config=config)
    return folder


@pytest.mark.parametrize(
    ("args", "said", "rank"),
    [(*case, 7 * (number % 2)) for number, case in enumerate(BAD)],
    ids=[" ".join(args) for args, _ in BAD],
)
@pytest.mark.slow(but=4)
def test_bad_input_is_refused(
    inputs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    said: list[str],
    rank: int,
) -> None:
    monkeypatch.chdir(inputs)
    monkeypatch.setattr(failures, "LAUNCHER_SECONDS", 0.0)
    exit_code = main(["--device", "cpu", *args], EIGHT | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    shown = capsys.readouterr()
    assert exit_code == 2 and not dist.is_initialized()
    assert shown.err.startswith("error: ") and shown.out == ""
    for part in said:
        assert part in shown.err


@pytest.mark.slow
def test_only_one_rank_speaks_and_the_run_ends(launch: Callable[..., Run], tmp_path: Path) -> None:
    with launch(["--sp-ring", "4", "--model", "tinny"], tmp_path, ranks=2) as run:
        ended = run.end()
    assert ended.exit_code != 0 and ended.out == ""
    *_, first, second, third, end = ended.err.splitlines()  # of torchrun's summary
    assert first == "  traceback : error: 2 problems:" and end == 60 * "="
    assert second.startswith("    1. --model tinny") and third.startswith("    2. --sp-ring 4")
    assert ended.err.count("2 problems") == 1
    assert "usp/commands/" not in ended.err  # no traceback of ours


@pytest.mark.slow
def test_a_tool_under_torchrun_refuses_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(failures, "reachable_store", lambda launch: store)
    monkeypatch.setattr(failures, "LAUNCHER_SECONDS", 0.0)
    monkeypatch.setattr("usp.__main__.leave", lambda code: sys.exit(code))
    for rank, exit_code in (("1", 2), ("0", 0)):
        file = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / rank)}
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **file}
        with pytest.raises(SystemExit) as left:
            tool(["calibrate", "--out", str(tmp_path / "x.json"), "--heads", "0"], place)
        assert left.value.code == exit_code
    assert [path.name for path in tmp_path.iterdir()] == ["1"] and "--heads" in (tmp_path / "1").read_text()
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_of_the_ranks_of_a_host_that_refuse_only_one_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(failures, "reachable_store", lambda launch: store)
    refusal = failures.ending_of(failures.ConfigurationError("no"), 0)

    def end(rank: int) -> tuple[int, int]:
        launch, file = Launch(rank, 4, local_rank=rank % 2, local_world_size=2), tmp_path / f"{rank}.json"
        return rank // 2, failures.end(refusal, launch, str(file))

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(end, range(4))) == [(0, 0), (0, 2), (1, 0), (1, 2)]  # of two hosts
    assert ["error: no" in file.read_text() for file in tmp_path.iterdir()] == [True, True]

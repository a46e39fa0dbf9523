"""Every example runs with the command in its docstring; on two ranks: test_train_cli.py has a grid of four."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.e2e.processes import ROOT, run_here, run_script
from tests.harness.ranks import RankPool

EXAMPLES = [  # ulysses, ring
    ("hf_trainer.py", (2, 1), ("--output", "out"), "accelerate"),
    ("deepspeed_ulysses.py", (1, 2), (), "deepspeed"),
]


@pytest.mark.parametrize(("name", "grid", "args", "needs"), EXAMPLES, ids=[name for name, *_ in EXAMPLES])
@pytest.mark.slow
def test_an_example_runs_and_learns(
    ranks: RankPool,
    tmp_path: Path,
    exhaustive: bool,
    name: str,
    grid: tuple[int, int],
    args: tuple[str, ...],
    needs: str | None,
) -> None:
    """With --exhaustive by its own command, else on ranks that need not start."""
    if needs and find_spec(needs) is None:
        pytest.skip(f"the package {needs} is not installed")
    script, size = ROOT / "examples" / name, math.prod(grid)
    flags = ["--ulysses", str(grid[0]), "--ring", str(grid[1]), "--seq-len", "512", *args]
    if exhaustive:
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        ended = subprocess.run(
            [sys.executable, "-m", *torchrun, str(script), *flags],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert ended.returncode == 0, ended.stderr
        out = ended.stdout
    else:
        out = ranks.run(run_script, size, script, flags, tmp_path)[0]
    losses = [float(loss) for loss in re.findall(r"loss'?:? '?(\d+\.\d+)", out)]
    assert len(losses) >= 2 and losses[-1] < losses[0], out


@pytest.mark.slow
def test_joint_attention_on_four_ranks_trains_as_one_process(ranks: RankPool, tmp_path: Path) -> None:
    flags = ["--side", "7", "--steps", "6", "--save"]  # 49 tokens
    losses, weights = [], []
    for ulysses, ring in ((1, 1), (2, 2)):
        args = [*flags, f"{ring}.pt", "--ulysses", str(ulysses), "--ring", str(ring)]
        out = ranks.run(run_script, ulysses * ring, ROOT / "examples" / "joint_dit.py", args, tmp_path)[0]
        losses.append([float(loss) for loss in re.findall(r"loss (\d+\.\d+)", out)])
        weights.append(torch.load(tmp_path / f"{ring}.pt"))
    assert len(losses[0]) == 6 and losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, alone in weights[0].items():
        assert (weights[1][name] - alone).norm() <= 1e-5 * alone.norm(), name


@pytest.mark.slow
def test_each_run_of_the_rlhf_chain_saves_a_model(ranks: RankPool, tmp_path: Path, exhaustive: bool) -> None:
    """With --exhaustive by its own commands, else on ranks that need not start."""
    bin_folder, commands = tmp_path / "bin", tmp_path / "commands"
    bin_folder.mkdir()
    if not exhaustive:
        torchrun = bin_folder / "torchrun"
        torchrun.write_text(f'#!/bin/sh\n(printf "%s\\t" "$@"; echo) >> "{commands}"\n')
        torchrun.chmod(0o755)
    path = os.pathsep.join((str(bin_folder), str(Path(sys.executable).parent), os.environ["PATH"]))
    small = {"NPROC": "2", "SFT_STEPS": "1", "REWARD_STEPS": "1", "PPO_STEPS": "1", "PATH": path}
    flags = ("--prompts", "4", "--prompt-tokens", "64", "--sp-ring", "2")
    ended = subprocess.run(
        ["bash", str(ROOT / "examples" / "rlhf_chain.sh"), "chain", *flags],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **small},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    for line in commands.read_text().splitlines() if not exhaustive else ():
        standalone, nproc, size, script, *args = line.rstrip("\t").split("\t")
        assert (standalone, nproc, size, Path(script)) == ("--standalone", "--nproc-per-node", "2", ROOT / "rlhf.py")
        ranks.run(run_here, 2, "rlhf", args, tmp_path)
    for model in ("sft/model", "reward/model", "ppo/model", "ppo/critic"):
        assert (tmp_path / "chain" / model / "model.safetensors").is_file(), model


@pytest.mark.exhaustive
def test_the_context_extension_draws_its_plots(tmp_path: Path) -> None:
    example = ROOT / "examples" / "context_extension.py"
    ended = subprocess.run(
        [sys.executable, str(example), str(tmp_path / "out"), "--steps", "20", "--ranks", "2"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    assert "stage 2 of 2: steps 3 to 4\nranks: 2 (ulysses=2)" in ended.stdout
    for plot in ("short", "yarn", "long", "loss-by-position"):
        assert (tmp_path / "out" / f"{plot}.png").is_file(), plot


# srun is told to stop, and leaves what is in RESULT. It waits for scancel, which the script's trap calls.
SRUN = """#!/bin/bash
[[ "$*" != *vllm* ]] || { echo "$@" > served.txt; exit; }
echo "$@" > srun.txt
kill -USR1 $PPID
until [[ -e scancel.txt ]]; do sleep 0.01; done
[[ -z "$RESULT" ]] || mkdir -p "runs/job-7/$RESULT"
exit 1
"""


@pytest.mark.parametrize(
    ("result", "requeued", "servers"), [("", True, 0), ("model", False, 0), ("adapter", False, 0), ("model", False, 2)]
)
def test_the_slurm_script_passes_cores_on_and_requeues_what_is_not_finished(
    tmp_path: Path, result: str, requeued: bool, servers: int
) -> None:
    programs = {"srun": SRUN, "scancel": "#!/bin/bash\necho > scancel.txt\n"}
    programs["curl"] = '#!/bin/bash\nuntil [[ -s served.txt ]]; do sleep 0.01; done\necho "$@" > asked.txt\n'
    programs["scontrol"] = "#!/bin/bash\n[[ $1 == requeue ]] && echo > requeued.txt || printf '%s\\n' host host{2..4}\n"
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"JOB_NAME": "job", "JOB_ID": "7", "JOB_NODELIST": "host", "JOB_NUM_NODES": "2", "CPUS_PER_TASK": "48"}
    slurm |= {"JOB_NUM_NODES": "4"} if servers else {}
    environment = {f"SLURM_{name}": value for name, value in slurm.items()}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RESULT": result, "MIN_HOSTS": "1" if result else ""}
    environment |= {"SERVERS": str(servers), "MODEL": "m", "PROGRAM": "rlhf.py"} if servers else {}
    script = str(ROOT / "examples" / "slurm.sbatch")
    ended = subprocess.run(["bash", script, "--steps", "9"], cwd=tmp_path, env=environment, timeout=60, check=False)
    assert ended.returncode == 1 and (tmp_path / "requeued.txt").exists() == requeued
    words = (tmp_path / "srun.txt").read_text().split()
    assert words[words.index("--cpus-per-task") + 1] == "48" and words.index("--cpus-per-task") < words.index(
        "torchrun"
    )
    urls = ["--model", "m", "--rollout-engine", "http://host3:8000/v1,http://host4:8000/v1"] if servers else []
    program = ["rlhf.py" if servers else "train.py", "--output", "runs/job-7", "--resume", "auto"]
    assert words[-len([*program, *urls]) - 2 :] == [*program, *urls, "--steps", "9"]
    if servers:
        assert words[:4] == ["--nodes", "2", "--nodelist", "host,host2"]
        served = (tmp_path / "served.txt").read_text().split()
        assert served[:4] == ["--nodes", "2", "--nodelist", "host3,host4"] and served[-1] == "m"
        assert (tmp_path / "asked.txt").read_text().endswith(" http://host3:8000/health\n")
    meeting = "--nnodes 1:2 --rdzv-endpoint runs/job-7.hosts" if result else "--nnodes 2 --rdzv-endpoint host:29500"
    assert meeting in " ".join(words) and ("--no-kill" in words) == bool(result)

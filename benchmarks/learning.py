"""Learning curves: GRPO on the verifiable task, and PPO with a trained reward model, from three seeds each.

grpo    rlhf.py with its defaults: random weights, supervised steps, GRPO; the score is the share of correct answers
ahead   the same with --plan separation --staleness 1
ppo     examples/rlhf_chain.sh: supervised training, a reward model, PPO; the score is the reward model's

python -m benchmarks.learning                     # about an hour on two cores
python -m benchmarks.learning --only ppo          # keeps the saved results of the other
python -m benchmarks.learning --only grpo --seeds 1 --no-save
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.record import RESULTS, Record

ROOT = Path(__file__).parents[1]
RANKS = 8
DEGREES = ["--sp-ulysses", "2", "--sp-ring", "2"]
GRPO = {"grpo": [], "ahead": ["--plan", "separation", "--staleness", "1"]}
WINDOW = 10  # steps in a moving average


def run(algorithm: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train, and return the total seconds and the score of every step."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    flags = [*DEGREES, "--seed", str(seed)]
    if algorithm in GRPO:
        flags += ["--algorithm", "grpo", "--output", str(folder / algorithm), *GRPO[algorithm]]
        command = [*torchrun, str(ROOT / "rlhf.py"), *flags]
    else:
        command = ["bash", str(ROOT / "examples" / "rlhf_chain.sh"), str(folder), *flags]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "NPROC": str(RANKS)}
    begin = time.monotonic()
    ended = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        sys.exit(f"{' '.join(command)}\n{ended.stdout[-4000:]}")
    seconds = time.monotonic() - begin
    records = [json.loads(line) for line in (folder / algorithm / "metrics.jsonl").read_text().splitlines()]
    return {
        "algorithm": algorithm,
        "seed": seed,
        "seconds": seconds,
        "scores": [record["score"] for record in records],
        "kl": records[-1].get("kl", records[-1].get("actor/ref_kl")),
    }


def first_at(scores: list[float], level: float) -> int | None:
    """Return the first step at which the mean of the last `WINDOW` scores reaches `level`."""
    means = (sum(scores[at - WINDOW : at]) / WINDOW for at in range(WINDOW, len(scores) + 1))
    return next((WINDOW + number for number, mean in enumerate(means) if mean >= level), None)


def row(result: dict[str, Any]) -> tuple[str, ...]:
    scores = result["scores"]
    reached = first_at(scores, 0.9) if result["algorithm"] in GRPO else None
    return (
        result["algorithm"],
        str(result["seed"]),
        f"{scores[0]:.3f}",
        f"{sum(scores[-WINDOW:]) / WINDOW:.3f}",
        str(reached or ""),
        str(len(scores)),
        f"{result['seconds'] / 60:.1f}",
    )


def record_of(results: list[dict[str, Any]]) -> Record:
    """Return a table with one row per run."""
    return Record.of(
        "learning",
        "Learning curves of GRPO and PPO",
        ("algorithm", "seed", "first score", "mean of the last ten", "0.9 at step", "steps", "minutes in all"),
        map(row, results),
        (
            f"{RANKS} ranks, {' '.join(DEGREES)}. grpo: share of correct answers; chance level is 0.125. ahead: the "
            "same with --staleness 1. ppo: mean score from the trained reward model, which has no absolute scale.",
            "0.9 at step: when the mean of ten steps reaches 0.9. Minutes include everything from random weights on: "
            "supervised steps, the reward model for ppo, startup and checkpoints.",
        ),
        results,
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs per algorithm")
    parser.add_argument("--only", choices=(*GRPO, "ppo"), help="run one of the algorithms")
    parser.add_argument("--no-save", action="store_true", help="print the result without saving it")
    options = parser.parse_args(argv)
    path, asked = RESULTS / "learning.json", [options.only] if options.only else [*GRPO, "ppo"]
    known = Record.load(path).data if path.exists() else []
    results = [result for result in known if result["algorithm"] not in asked]
    for algorithm in asked:
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory(prefix="learning-") as folder:
                results.append(run(algorithm, seed, Path(folder)))
            print(" ".join(row(results[-1])), flush=True)
            if not options.no_save:  # saved after every run, because all of them take an hour
                record_of(results).save(path)
    record_of(results).print()


if __name__ == "__main__":
    main()

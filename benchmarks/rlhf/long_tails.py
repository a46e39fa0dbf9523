"""Seconds of a GRPO step whose responses have a long tail of lengths, on two emulated hosts: synchronous, with samples
made beside training, and with partial rollouts; and what a policy learns meanwhile, step by step, from three seeds.

python -m benchmarks.rlhf.long_tails
python -m benchmarks.rlhf.long_tails --only curves    # keeps the saved times
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean as mean
from statistics import quantiles
from typing import Any

from benchmarks.harness.cluster import cluster, unavailable
from benchmarks.harness.record import RESULTS, Record, finish
from benchmarks.rlhf.staleness import RATE, WARMUP, measure
from usp.rlhf.config import RlhfConfig
from usp.rlhf.runtime.measure import LENGTHS_FILE

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 64, 512
STOPS = 8  # of the 259 tokens of random weights end a response: lengths are geometric, with a mean of about 32
BASE = "synchronous, own ranks"
SYSTEMS: dict[str, dict[str, Any]] = {
    "synchronous, all ranks": {"plan": "flattening"},
    BASE: {"plan": "separation"},
    "--staleness 1": {"plan": "separation", "staleness": 1},
    "--staleness 2 --partial-rollouts": {"plan": "separation", "staleness": 2, "partial_rollouts": True},
    "--staleness 4 --partial-rollouts": {"plan": "separation", "staleness": 4, "partial_rollouts": True},
}
ROOT = Path(__file__).parents[2]
CURVES = {
    BASE: [],
    "--staleness 2 --partial-rollouts": ["--staleness", "2", "--partial-rollouts"],
    "--staleness 4 --partial-rollouts": ["--staleness", "4", "--partial-rollouts"],
}
SEEDS, CURVE_STEPS, LEARNING_RATE, LAST = 3, 40, 2e-3, 10
REWARD = """def letters(prompt, response, answer):
    return sum(map(str.isalpha, response)) / max(1, len(response))
"""


def curve(flags: list[str], seed: int, folder: Path) -> list[float]:
    """Train a policy whose reward is the share of letters; return the mean score of the samples of each step."""
    (folder / "reward.py").write_text(REWARD)
    given = {
        "model": "tiny",
        "tokenizer": "bytes",
        "device": "cpu",
        "plan": "separation",
        "prompts": PROMPTS,
        "group-size": GROUP,
        "prompt-tokens": PROMPT_TOKENS,
        "max-new-tokens": NEW_TOKENS // 2,
        "stop-ids": ",".join(map(str, range(STOPS))),
        "reward-function": f"{folder / 'reward.py'}:letters",
        "steps": CURVE_STEPS,
        "sft-steps": 0,
        "warmup-steps": 5,
        "learning-rate": LEARNING_RATE,
        "checkpoint-every": 0,
        "seed": seed,
        "output": folder / "run",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "rlhf.py"), *(text for name, value in given.items() for text in (f"--{name}", str(value)))]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*command, *flags], env=environ, stdout=-1, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        sys.exit(f"{' '.join(command)}\n{ended.stdout[-4000:]}")
    return [json.loads(line)["score"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def with_curves(record: Record) -> Record:
    """Return a record of times with the scores of every step."""
    data = []
    for entry in record.data:
        scores, flags = [], CURVES.get(entry["system"])
        for seed in range(SEEDS if flags is not None else 0):
            with tempfile.TemporaryDirectory() as folder:
                scores.append(curve(flags or [], seed, Path(folder)))
            print(entry["system"], seed, f"{mean(scores[-1][-LAST:]):.3f}", flush=True)
        data.append(entry | {"scores": scores})
    ends = [[mean(scores[-LAST:]) for scores in entry["scores"]] for entry in data if entry["scores"]]
    first = [scores[0] for entry in data for scores in entry["scores"]]
    told = "; ".join(f"{name} {min(of):.2f} to {max(of):.2f}" for name, of in zip(CURVES, ends, strict=True))
    note = (
        f"Curves: the reward is the share of letters, learning rate {LEARNING_RATE:g}, responses of up to "
        f"{NEW_TOKENS // 2} tokens; {min(first):.2f} to {max(first):.2f} in the first step. Means of the last {LAST} "
        f"of {CURVE_STEPS} steps, {SEEDS} seeds: {told}."
    )
    return replace(record, notes=(*(each for each in record.notes if not each.startswith("Curves")), note), data=data)


def system(fields: dict[str, Any], steps: int) -> RlhfConfig:
    return RlhfConfig(
        **fields,
        prompts=PROMPTS,
        group_size=GROUP,
        prompt_tokens=PROMPT_TOKENS,
        max_new_tokens=NEW_TOKENS,
        stop_ids=",".join(map(str, range(STOPS))),
        learning_rate=1e-9,  # lengths stay
        steps=WARMUP + steps + 5,  # the last ones begin no samples
        sft_steps=0,
        device="cpu",
        tokenizer="bytes",
    )


def responses(run: Path) -> list[list[int]]:
    """Return the lengths of the responses of each counted step."""
    lines = (run / LENGTHS_FILE).read_text().splitlines()
    return [json.loads(line)["responses"] for line in lines][WARMUP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="counted steps of each")
    parser.add_argument("--only", choices=("times", "curves"), help="measure one; curves keeps the saved times")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    arguments = parser.parse_args()
    saved = arguments.output or RESULTS / "long_tails.json"
    record = Record.load(saved) if arguments.only == "curves" else times(arguments.steps)
    finish(record if arguments.only == "times" else with_curves(record), saved)


def times(steps: int) -> Record:
    """Return the record of the times of a step."""
    if reason := unavailable():
        raise SystemExit(f"emulated hosts are not available: {reason}")
    systems = {name: system(fields, steps) for name, fields in SYSTEMS.items()}
    with tempfile.TemporaryDirectory() as folder, cluster(2, RATE) as hosts:
        ranks = hosts.call(measure, 1, systems, steps, folder, timeout=1800.0)
        lengths = responses(Path(folder, BASE))
    rows, data = [], []
    for name in systems:
        first, second = (of_rank[name] for of_rank in ranks)
        used = [mean(of.cpu_seconds) for of in (first, second)]
        # The ranks of the second system wait for each other; those of the others work at once.
        alone = sum(used) if name == BASE else max(used)
        stale = [mean(step.get(key, 0.0) for step in first.metrics) for key in ("staleness_mean", "staleness_max")]
        shown = f"{stale[0]:.1f}, {stale[1]:.1f}" if systems[name].partial_rollouts else str(systems[name].staleness)
        data.append({"system": name, "seconds": first.seconds, "cpu": used, "alone": alone, "staleness": stale})
        rows.append([name, f"{mean(first.seconds):.3f}", *(f"{each:.3f}" for each in used), shown])
    (base,) = (each for each in data if each["system"] == BASE)
    for row, each in zip(rows, data, strict=True):
        row += [f"{mean(each['seconds']) / mean(base['seconds']):.2f}", f"{each['alone'] / base['alone']:.2f}"]
    drawn = [length for of_step in lengths for length in of_step]
    at = quantiles(drawn, n=100)
    return Record.of(
        "long_tails",
        f"GRPO steps with a long tail of lengths, on two hosts of one rank, {RATE} between them",
        (
            *("", "step (s)", "CPU of rank 0 (s)", "CPU of rank 1 (s)", "staleness, mean and max"),
            *("step, of own ranks", "CPU, of own ranks"),
        ),
        [tuple(row) for row in rows],
        (
            f"Preset tiny, one thread per rank: {PROMPTS} prompts of up to {PROMPT_TOKENS} tokens, {GROUP} responses "
            f"each. Lengths are geometric: {STOPS} of the 259 tokens end a response. Mean {mean(drawn):.0f} tokens, "
            f"median {at[49]:.0f}, 90% {at[89]:.0f}, 99% {at[98]:.0f}; the longest of a step's {PROMPTS * GROUP} "
            f"{mean(map(max, lengths)):.0f} on average.",
            f"{steps} steps, one of each in turn on the same ranks; means.",
            "Synchronous: on all ranks, each generates and trains on half of the samples (flattening); on own ranks, "
            "one generates and the other trains (separation), as in the rows below.",
            "CPU: what the processes used, whatever else the machine did. In the last column, a step takes the "
            "sum of both where one waits for the other (on own ranks), otherwise the larger one.",
        ),
        data,
        command="python -m benchmarks.rlhf.long_tails",
    )


if __name__ == "__main__":
    main()

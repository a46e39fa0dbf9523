"""Learning curves from three seeds: GRPO on the verifiable task, PPO with a trained reward model, GRPO with a tool.

grpo    rlhf.py with its defaults: random weights, supervised steps, GRPO; the score is the share of correct answers
ppo     examples/rlhf_chain.sh: supervised training, a reward model, PPO; the score is the reward model's
tools   a prompt is a key, a letter; its value, a digit, is in one of 26 passages that the tool `search` finds by it.
        Supervised steps leave a policy that searches in a seventh of its responses and guesses in the others, of which
        a tenth is right; GRPO with --environment tools learns to search. Random weights, bytes, one process

python -m benchmarks.learning                     # about an hour on two cores
python -m benchmarks.learning --only tools        # minutes; keeps the saved results of the others
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from benchmarks.harness.record import RESULTS, ROOT, Record, parser_of

RANKS, DEGREES = 8, ("--sp-ulysses", "2", "--sp-ring", "2")
LEVELS = {"grpo": 0.9, "ppo": 0.0, "tools": 0.8}  # of correct answers; none where the score has no scale
WINDOW = 10  # steps in a moving average
SEARCHES, SUPERVISED = 0.15, 400  # of tools: share of the demonstrations, supervised steps
CALL = '<tool_call>{{"name": "search", "arguments": {{"query": "{key}"}}}}</tool_call>'
TURNS = ("--prompts", "8", "--group-size", "8", "--max-new-tokens", "80", "--max-turns", "3", "--stop", "</tool_call>")
QUESTION = "Do policies learn?"
COLUMNS = (
    "algorithm", "seed", "first score", "mean of the first ten", "mean of the last ten", "reached at step", "steps",
    "minutes in all",
)  # fmt: skip


def commands(algorithm: str, seed: int, folder: Path) -> list[list[str]]:
    """Return the programs of a run, the last of which writes its metrics to `folder/algorithm`."""
    program, flags = [sys.executable, str(ROOT / "rlhf.py")], ["--seed", str(seed)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    output = ["--output", str(folder / algorithm)]
    if algorithm == "grpo":
        return [[*torchrun, program[1], *DEGREES, *flags, "--algorithm", "grpo", *output]]
    if algorithm == "ppo":
        return [["bash", str(ROOT / "examples" / "rlhf_chain.sh"), str(folder), *DEGREES, *flags]]
    write_tool_data(folder, seed)
    flags += ["--device", "cpu", "--checkpoint-every", "0"]
    sft = ["--algorithm", "sft", "--data", str(folder / "demonstrations.jsonl"), "--steps", str(SUPERVISED)]
    sft += ["--output", str(folder / "sft"), "--learning-rate", "3e-3"]
    grpo = ["--algorithm", "grpo", "--data", str(folder / "questions.jsonl"), "--steps", "100", *TURNS, *output]
    grpo += ["--model", str(folder / "sft" / "model"), "--learning-rate", "3e-4"]
    grpo += ["--environment", "tools", "--tools", f"{ROOT / 'examples' / 'tools.py'}:search"]
    return [[*program, *sft, *flags], [*program, *grpo, *flags]]


def write_tool_data(folder: Path, seed: int) -> None:
    """Write the passages, demonstrations and questions of a seed."""
    draw = random.Random(seed)
    values = {key: str(draw.randrange(10)) for key in ascii_lowercase}
    (folder / "texts").mkdir()
    (folder / "texts" / "values.txt").write_text("\n\n".join(f"{key} {value}" for key, value in values.items()))

    def demonstration(key: str) -> str:
        if draw.random() >= SEARCHES:
            return str(draw.randrange(10))
        read = f"\n<tool_response>\n{key} {values[key]}\n</tool_response>\n"
        return f"{CALL.format(key=key)}{read}{values[key]}"

    keys = [draw.choice(list(values)) for _ in range(12000)]
    for name, answer in (("demonstrations", demonstration), ("questions", values.__getitem__)):
        rows = [json.dumps({"prompt": f"{key}=", "answer": answer(key)}) for key in keys]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))


def run(algorithm: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train, and return the total seconds and the score of every step."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    environ = {
        **os.environ,
        "TEXTS": str(folder / "texts"),
        "PYTHONPATH": str(ROOT),
        "PATH": path,
        "NPROC": str(RANKS),
        "OMP_NUM_THREADS": "1",
    }
    begin = time.monotonic()
    for command in commands(algorithm, seed, folder):
        ended = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ended.returncode:
            sys.exit(f"{' '.join(command)}\n{ended.stdout[-4000:]}")
    seconds, lines = time.monotonic() - begin, (folder / algorithm / "metrics.jsonl").read_text().splitlines()
    scores = [round(json.loads(line)["score"], 6) for line in lines]
    return {"algorithm": algorithm, "level": LEVELS[algorithm], "seed": seed, "seconds": seconds, "scores": scores}


def means(scores: Sequence[float]) -> list[float]:
    return [sum(scores[at - WINDOW : at]) / WINDOW for at in range(WINDOW, len(scores) + 1)]


def row(result: dict[str, Any]) -> tuple[str, ...]:
    mean = means(result["scores"])
    reached = next((n for n, value in enumerate(mean, start=WINDOW) if value >= result["level"] > 0), None)
    return (
        result["algorithm"],
        str(result["seed"]),
        *(f"{score:.3f}" for score in (result["scores"][0], mean[0], mean[-1])),
        f"{result['level']} at {reached}" if reached else "",
        str(len(result["scores"])),
        f"{result['seconds'] / 60:.1f}",
    )


def answer(results: Sequence[dict[str, Any]]) -> str:
    found = []
    for algorithm, what in (
        ("grpo", "Correct answers under GRPO"),
        ("ppo", "Scores by the reward model under PPO"),
        ("tools", "Right answers of a policy that learns to use a tool"),
    ):
        if curves := [result["scores"] for result in results if result["algorithm"] == algorithm]:
            first, last = ([means(scores)[at] for scores in curves] for at in (0, -1))
            found.append(
                f"{what}: {min(first):.3f} to {max(first):.3f} in the first ten steps, {min(last):.3f} to "
                f"{max(last):.3f} in the last ten of {len(curves[0])}"
            )
    return f"Means of {len(curves)} seeds each. {'. '.join(found)}."


def record_of(results: Sequence[dict[str, Any]]) -> Record:
    """Return a table with one row per run."""
    notes = (
        f"grpo, ppo: {RANKS} ranks, {' '.join(DEGREES)}. grpo: share of correct answers; chance level is 0.125. ppo: "
        "mean score from the trained reward model, which has no absolute scale.",
        f"tools: {SUPERVISED} supervised steps of 64 demonstrations, {SEARCHES:.0%} of which search, from random "
        "weights; 8 responses to each of 8 prompts in a step of GRPO. Score: share of right answers; a guess is right "
        "in a tenth.",
        "Reached: when the mean of ten steps reaches the level. Minutes include everything from random weights on: "
        "supervised steps, the reward model for ppo, startup and checkpoints.",
    )
    return Record.of("learning", QUESTION, answer(results), COLUMNS, map(row, results), notes, results)


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each algorithm")
    parser.add_argument("--only", choices=tuple(LEVELS), help="run one of the algorithms")
    options = parser.parse_args()
    path, asked = options.output or RESULTS / "learning.json", [options.only] if options.only else list(LEVELS)
    known = Record.load(path).data if path.exists() else []
    results = [result for result in known if result["algorithm"] not in asked]
    for algorithm in asked:
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory(prefix="learning-") as folder:
                results.append(run(algorithm, seed, Path(folder)))
            print(" ".join(row(results[-1])), flush=True)
            record_of(results).save(path)  # after every run, because all of them take an hour
    record_of(results).print()


if __name__ == "__main__":
    main()

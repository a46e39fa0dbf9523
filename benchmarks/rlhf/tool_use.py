"""Tool use that is learned: GRPO on episodes of two turns, from three seeds.

A prompt is a key, a letter; its value, a digit, is in one of 26 passages that the tool `search` finds by the key.
Supervised steps leave a policy that searches in a seventh of its responses and guesses in the others, of which a tenth
is right; GRPO with --environment tools learns to search, and to answer with what it read. Random weights, bytes, one
process.

python -m benchmarks.rlhf.tool_use               # minutes on two cores
python -m benchmarks.rlhf.tool_use --seeds 1 --no-save
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from benchmarks.harness.record import RESULTS, Record

ROOT = Path(__file__).parents[2]
SEARCHES = 0.15  # share of the demonstrations
SUPERVISED, STEPS, WINDOW = 400, 100, 10
CALL = '<tool_call>{{"name": "search", "arguments": {{"query": "{key}"}}}}</tool_call>'
FLAGS = ["--prompts", "8", "--group-size", "8", "--max-new-tokens", "80", "--max-turns", "3", "--stop", "</tool_call>"]


def write_data(folder: Path, seed: int) -> None:
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


def run(seed: int, folder: Path) -> dict[str, Any]:
    """Train, and return the seconds and the scores of every step."""
    write_data(folder, seed)
    tool = "search=" + json.dumps({"path": str(folder / "texts"), "results": 1})
    common = ["--device", "cpu", "--seed", str(seed), "--checkpoint-every", "0"]
    supervised = ["--algorithm", "sft", "--data", str(folder / "demonstrations.jsonl"), "--steps", str(SUPERVISED)]
    supervised += ["--output", str(folder / "sft"), "--learning-rate", "3e-3"]
    policy = ["--algorithm", "grpo", "--data", str(folder / "questions.jsonl"), "--steps", str(STEPS), *FLAGS]
    policy += ["--model", str(folder / "sft" / "model"), "--output", str(folder / "grpo"), "--learning-rate", "3e-4"]
    policy += ["--environment", "tools", "--tools", json.dumps([tool])]
    begin = time.monotonic()
    for flags in (supervised, policy):
        command = [sys.executable, str(ROOT / "rlhf.py"), *flags, *common]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ended.returncode:
            sys.exit(f"{' '.join(command)}\n{ended.stdout[-4000:]}")
    lines = (folder / "grpo" / "metrics.jsonl").read_text().splitlines()
    scores = [json.loads(line)["score"] for line in lines]
    return {"algorithm": "grpo", "seed": seed, "seconds": time.monotonic() - begin, "scores": scores}


def row(result: dict[str, Any]) -> tuple[str, ...]:
    scores = result["scores"]
    means = [sum(scores[at - WINDOW : at]) / WINDOW for at in range(WINDOW, len(scores) + 1)]
    reached = next((str(WINDOW + number) for number, mean in enumerate(means) if mean >= 0.8), "")
    minutes = f"{result['seconds'] / 60:.1f}"
    return str(result["seed"]), f"{scores[0]:.3f}", f"{means[0]:.3f}", f"{means[-1]:.3f}", reached, minutes


def record_of(results: list[dict[str, Any]]) -> Record:
    """Return a table with one row per seed."""
    return Record.of(
        "tool_use",
        "Learning to use a tool",
        ("seed", "first score", "mean of the first ten", "mean of the last ten", "0.8 at step", "minutes in all"),
        map(row, results),
        (
            f"{SUPERVISED} supervised steps of 64 demonstrations, {SEARCHES:.0%} of which search, from random weights; "
            f"{STEPS} steps of GRPO with 8 responses to each of 8 prompts. Score: share of right answers; a guess is "
            "right in a tenth.",
            "0.8 at step: when the mean of ten steps reaches 0.8. Minutes include everything from random weights on; "
            "other programs had most of the machine.",
        ),
        results,
        command="python -m benchmarks.rlhf.tool_use",
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs")
    parser.add_argument("--no-save", action="store_true", help="print the result without saving it")
    options = parser.parse_args(argv)
    results = []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory(prefix="tool-use-") as folder:
            results.append(run(seed, Path(folder)))
        print(" ".join(row(results[-1])), flush=True)
        if not options.no_save:
            record_of(results).save(RESULTS / "tool_use.json")
    record_of(results).print()


if __name__ == "__main__":
    main()

"""CPU seconds of a GRPO step, against TRL's GRPOTrainer: same model, prompts and cores, alternating runs.

pip install trl
python -m benchmarks.rlhf.grpo_step
python -m benchmarks.rlhf.grpo_step --engine vllm      # decodes for both, in the processes of training; see .ci/vllm
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.data import train_tokenizer
from benchmarks.harness.measure import in_turns
from benchmarks.harness.record import Record, finish
from benchmarks.rlhf.grpo_systems import PHASES, TOKENS, Job, job_text
from usp.data.sources import STDLIB, find_files

Steps = dict[str, list[dict[str, float]]]  # of each system
ROOT = Path(__file__).parents[2]
VOCAB, PROMPT = 4096, 64
WARMUP = 1  # steps of a run that are not counted
SYSTEMS = ("ours", "trl")
GENERATE = "transformers' generate"
VLLM = (
    "vLLM colocated, which compiles the model, with importance sampling of the difference to the engine left out, as "
    "ours by default: it costs TRL a forward more. Set for it: a cache of 1 GiB, as ours, and vLLM's linear layers not "
    "packed for oneDNN, since TRL writes to parameters that packing removes, and fails at the first update without"
)
REWARD = '''"""A reward that varies: the share of letters in a response."""


def score(prompt, response, answer):
    return sum(map(str.isalpha, response)) / max(1, len(response))
'''


def prepare(folder: Path, prompts: int) -> int:
    """Write a model with its tokenizer, prompts and a reward function; return the number of parameters."""
    train_tokenizer(folder / "model", VOCAB)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "model")
    text = "".join(file.path.read_text("utf-8", "replace") for file in find_files(STDLIB, "text").files[:20])
    starts = [start for start, _ in tokenizer(text, return_offsets_mapping=True)["offset_mapping"][::PROMPT]]
    rows = [{"prompt": text[start:end], "answer": ""} for start, end in pairwise(starts[: prompts + 1])]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return model.num_parameters()


def run(system: str, job: Job) -> list[dict[str, float]]:
    """Run a system; return the CPU seconds by phase, and the tokens, of each step, summed over ranks."""
    output = Path(job.folder) / f"{job.name}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.ranks)]
    command += ["-m", "benchmarks.rlhf.grpo_systems", system, job_text(job), str(output)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    ended = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        sys.exit(f"{system} failed:\n{ended.stdout[-4000:]}")
    by_rank = [json.loads(Path(f"{output}-{rank}").read_text()) for rank in range(job.ranks)]
    return [
        {name: sum(step[name] for step in steps) for name in (*PHASES, TOKENS)}
        for steps in list(zip(*by_rank, strict=True))[WARMUP:]
    ]


def rows_of(ranks: int, steps: Steps) -> Iterator[tuple[str, ...]]:
    """Yield the medians of each phase, and of their sum."""
    for name in (*(phase for phase in PHASES if any(step[phase] for step in steps["ours"])), "step"):
        ours, theirs = (
            median(sum(step[phase] for phase in PHASES) if name == "step" else step[name] for step in steps[system])
            for system in SYSTEMS
        )
        yield str(ranks), name, f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"


def notes_of(job: Job, parameters: int, runs: str, found: dict[int, Steps]) -> Iterator[str]:
    """Yield what both systems did."""
    yield (
        f"llama with {parameters / 1e6:.0f} M parameters, vocabulary {VOCAB:,}, float32. {job.prompts} prompts of "
        f"{PROMPT} tokens, {job.group_size} responses of at most {job.new_tokens} tokens to each, one optimizer step, "
        f"KL penalty {job.kl}. One core and one thread per rank."
    )
    for ranks, steps in found.items():
        ours, theirs = (mean(step[TOKENS] for step in steps[system]) for system in SYSTEMS)
        yield f"Ranks: {ranks}. Tokens generated per step: {ours:.0f}, TRL {theirs:.0f}."
    yield f"CPU seconds of all ranks together: medians of {runs} steps after a warm-up step, in alternating runs."
    yield (
        f"TRL: GRPOTrainer with its defaults, but without activation checkpointing; it generates with "
        f"{VLLM if job.vllm else GENERATE}. Its inference includes the rewards, which ours has under train and rest."
    )
    yield (
        "Inference is the reference's. By default neither computes the old policy's log-probabilities apart: they are "
        "those of the train step. Ours leaves the output head out for prompts; TRL does so on GPUs alone."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each system")
    parser.add_argument("--steps", type=int, default=4, help="counted steps of a run")
    parser.add_argument("--ranks", type=int, nargs="*", default=(1, 2), help="numbers of ranks")
    parser.add_argument("--engine", choices=("own", "vllm"), default="own", help="what decodes for both")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    arguments = parser.parse_args()
    vllm = arguments.engine == "vllm"
    if missing := [name for name in ("trl", *(["vllm"] if vllm else [])) if find_spec(name) is None]:
        sys.exit(f"this compares with {missing[0].upper()}, which is not installed: pip install {missing[0]}")
    cores = len(os.sched_getaffinity(0))
    if max(arguments.ranks) > cores:
        parser.error(f"--ranks {max(arguments.ranks)}: a rank needs a core of its own, and there are {cores}")
    peers = ["trl", *(metadata.packages_distributions()["vllm"][:1] if vllm else [])]
    found: dict[int, Steps] = {}
    with tempfile.TemporaryDirectory() as folder:
        parameters = prepare(Path(folder), prompts=256)
        job = Job(folder, "", WARMUP + arguments.steps, 1, vllm=vllm)
        for ranks in arguments.ranks:
            found[ranks] = {system: [] for system in SYSTEMS}
            for round_, system in in_turns(SYSTEMS, arguments.rounds):
                found[ranks][system] += run(system, replace(job, ranks=ranks, name=f"{system}-{ranks}-{round_}"))
    record = Record.of(
        "grpo_step_vllm" if vllm else "grpo_step",
        f"CPU seconds of a GRPO step{' with vLLM' if vllm else ''}, against TRL",
        ("ranks", "phase", "ours", "TRL", "ratio"),
        [row for ranks, steps in found.items() for row in rows_of(ranks, steps)],
        notes_of(job, parameters, f"{arguments.rounds} x {arguments.steps}", found),
        [{"ranks": ranks, "parameters": parameters, **steps} for ranks, steps in found.items()],
        command=f"python -m benchmarks.rlhf.grpo_step{' --engine vllm' if vllm else ''}",
        extra=[(name, metadata.version(name)) for name in peers],
    )
    finish(record, arguments.output)


if __name__ == "__main__":
    main()

"""Generation throughput of one rank against transformers' `generate` on the same cores: greedy, alternating runs.

python -m benchmarks.decode
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, PretrainedConfig

from benchmarks.harness.measure import in_turns
from benchmarks.harness.record import Record, finish
from usp.hf.integrate import apply_unified_sp
from usp.hf.models import empty_model, load_model_config, materialise
from usp.hf.weights import initialise
from usp.parallel import ParallelDims, ParallelMesh
from usp.rlhf.generation.generate import Generator
from usp.rlhf.graph import Generate

PROMPT = 64


@dataclass(frozen=True)
class Case:
    model: str
    batch: int

    def config(self) -> PretrainedConfig:
        if self.model == "tiny":
            return load_model_config("tiny")
        return AutoConfig.for_model(
            "llama",
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=2,
            vocab_size=8192,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
        )


CASES = [Case(model, batch) for model in ("tiny", "llama-20m") for batch in (1, 8, 32)]


def weights(config: PretrainedConfig) -> Any:
    model = empty_model(config)
    materialise(model, torch.device("cpu"))
    initialise(model, 0)
    return model.eval()


def systems(case: Case, new_tokens: int, mesh: ParallelMesh) -> tuple[dict[str, Callable[[], list]], int]:
    """Return functions that generate the responses as lists of ids, by system, and the model's parameter count."""
    ids = torch.randint(case.config().vocab_size, (case.batch, PROMPT), generator=torch.Generator().manual_seed(0))
    plain = weights(case.config())
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}

    def theirs(cache: str) -> list:
        # Equal limits, so that no token ends a response early.
        limits = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "eos_token_id": None}
        plain.generation_config.eos_token_id = None
        return plain.generate(ids, **options, **limits, cache_implementation=cache)[:, PROMPT:].tolist()

    generator = Generator(apply_unified_sp(weights(case.config()), mesh), mesh, slots=case.batch)
    work = Generate(max_new_tokens=new_tokens, temperature=0)

    def ours() -> list:
        return [response.tokens.tolist() for response in generator.generate(list(ids), work, [0] * case.batch)]

    runs = {"ours": ours, "dynamic": lambda: theirs("dynamic"), "static": lambda: theirs("static")}
    return runs, sum(parameter.numel() for parameter in plain.parameters())


def measure(case: Case, new_tokens: int, rounds: int, mesh: ParallelMesh) -> dict[str, Any]:
    """Return tokens per second of every system, by round."""
    runs, parameters = systems(case, new_tokens, mesh)
    first = {name: run() for name, run in runs.items()}
    differing = sum(a != b for a, b in zip(first["ours"], first["dynamic"], strict=True))
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for _, name in in_turns(list(runs), rounds):
        start = time.perf_counter()
        runs[name]()
        speeds[name].append(case.batch * new_tokens / (time.perf_counter() - start))
    return {"model": case.model, "batch": case.batch, "parameters": parameters, "differing": differing, **speeds}


def row(found: dict[str, Any]) -> tuple[str, ...]:
    ours, dynamic, static = (median(found[name]) for name in ("ours", "dynamic", "static"))
    # Ratios within a round are the least sensitive to other load on the machine.
    ratios = [a / max(b, c) for a, b, c in zip(found["ours"], found["dynamic"], found["static"], strict=True)]
    return (
        found["model"],
        f"{found['parameters'] / 1e6:.1f}",
        str(found["batch"]),
        f"{ours:,.0f}",
        f"{dynamic:,.0f}",
        f"{static:,.0f}",
        f"{median(ratios):.2f}",
        str(found["differing"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens per response")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each system")
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="indices of the cases to run")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        mesh = ParallelMesh.create(ParallelDims())
        data = [measure(CASES[case], arguments.new_tokens, arguments.rounds, mesh) for case in arguments.cases]
        dist.destroy_process_group()
    record = Record.of(
        "decode",
        "Generation throughput of one rank, against transformers",
        ("model", "M parameters", "batch", "tokens/s", "transformers, dynamic", "static", "ratio", "differing"),
        map(row, data),
        (
            f"Greedy, float32, prompts of {PROMPT} tokens, {arguments.new_tokens} new tokens; median of "
            f"{arguments.rounds} rounds of alternating runs.",
            "ratio: ours / the faster of transformers' two caches, in a round. Ours also returns log-probabilities.",
            "differing: responses that are not identical to those of transformers, token for token.",
        ),
        data,
        extra=[("threads", str(torch.get_num_threads()))],
    )
    finish(record, arguments.output)


if __name__ == "__main__":
    main()

"""A policy's training step and log-probabilities with prompts computed once for all responses, against whole samples.

python -m benchmarks.rlhf.shared_prefixes
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.record import Record, finish
from tests.harness.ranks import RankPool
from usp.hf.models import load_model_config
from usp.parallel import ParallelDims, ParallelMesh
from usp.parallel.wire import SentBytes
from usp.rlhf.algorithms.objectives import NextToken
from usp.rlhf.graph import Inference, TrainStep
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.roles.role_model import RoleModel, RoleSpec
from usp.rlhf.roles.rows import plan_rows
from usp.rlhf.samples import Samples
from usp.train.engines.base import AdamW

PROMPT, RESPONSE, GROUP = 2048, 256, 8
GRIDS = ((1, 1), (2, 1), (1, 2), (2, 2))  # ulysses, ring


def group() -> Samples:
    """Return the responses to a prompt, whose tokens have a weight."""
    generator = torch.Generator().manual_seed(0)
    prompt, tokens = torch.randint(0, 256, (PROMPT,), generator=generator), PROMPT + RESPONSE
    place = torch.arange(tokens)
    weights = ((place >= PROMPT - 1) & (place < tokens - 1)).float() / (GROUP * RESPONSE)
    responses = torch.randint(0, 256, (GROUP, RESPONSE), generator=generator)
    whole = [torch.cat((prompt, response)) for response in responses]
    return Samples(tuple(range(GROUP)), {"tokens": whole, "weights": [weights] * GROUP, "mask": [weights] * GROUP})


def measure(grid: tuple[int, int], rounds: int) -> list[dict[str, Any]]:
    """Return what a rank measures of each kind: tokens of a row, seconds of each round, bytes sent in a step."""
    ulysses, ring = grid
    layout = CallLayout(tuple(range(ulysses * ring)), ParallelDims(ulysses=ulysses, ring=ring), micro_batch_tokens=0)
    mesh, samples = ParallelMesh.create(layout.dims), group()
    config = load_model_config("tiny")
    spec = RoleSpec("actor", "tiny", config, optimizer=AdamW(0.0), learning_rate=0.0)
    models: dict[bool, RoleModel] = {}
    found: dict[bool, dict[str, Any]] = {}
    for share in (False, True):
        models[share] = RoleModel(replace(spec, share_prefixes=share), layout, mesh, trained=True)
        models[share].fill()
        plan = plan_rows(samples, layout, mesh, share=share, counts="weights")
        assert plan is not None
        found[share] = {"ulysses": ulysses, "ring": ring, "shared": share, "tokens": plan.row_len}
        found[share] |= {"step": [], "logprobs": [], "sent": 0, "said": [], "norm": 0.0}
    for number in range(rounds + 1):  # the first warms up
        for share, model in models.items():
            dist.barrier()
            begin = perf_counter()
            with SentBytes() as sent:
                told = model.train_step([samples], TrainStep(NextToken()))
            dist.barrier()
            middle = perf_counter()
            said = model.inference(samples, Inference("logprobs"), "said").values.get("said", [])
            dist.barrier()
            found[share] |= {"sent": sent.total, "said": said, "norm": told["grad_norm"]}
            if number:
                found[share]["step"].append(middle - begin)
                found[share]["logprobs"].append(perf_counter() - middle)
    apart = [float((a - b).abs().max()) for a, b in zip(found[True]["said"], found[False]["said"], strict=True)]
    for row in found.values():
        row |= {"apart": max(apart, default=0.0), "norm_apart": abs(found[True]["norm"] / found[False]["norm"] - 1)}
        del row["said"]
    return list(found.values())


def _pairs(shared: bool) -> int:
    """Count the visible pairs of the group."""
    whole, own = PROMPT + RESPONSE, RESPONSE + 1
    before = whole - own
    every = before * (before + 1) // 2
    return GROUP * own * before + GROUP * own * (own + 1) // 2 + every * (1 if shared else GROUP)


def rows_of(data: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for whole, shared in zip(data[::2], data[1::2], strict=True):
        step, logprobs = ([a / b for a, b in zip(shared[key], whole[key], strict=True)] for key in ("step", "logprobs"))
        rows.append(
            (
                f"u{shared['ulysses']} r{shared['ring']}",
                f"{whole['tokens']} / {shared['tokens']}",
                f"{median(whole['step']):.2f}",
                f"{median(step):.2f}",
                f"{median(logprobs):.2f}",
                f"{shared['sent'] / whole['sent']:.2f}" if whole["sent"] else "",
                f"{shared['apart']:.0e}, {shared['norm_apart']:.0e}",
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="in which whole and shared samples take turns")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    arguments = parser.parse_args()
    data: list[dict[str, Any]] = []
    with RankPool() as pool:
        for grid in GRIDS:
            data += pool.run(measure, grid[0] * grid[1], grid, arguments.rounds)[0]
    record = Record.of(
        "shared_prefixes",
        f"Prompts computed once: {GROUP} responses of {RESPONSE} tokens to a prompt of {PROMPT}",
        ("degrees", "tokens", "step, s", "step", "log-probabilities", "bytes sent", "largest differences"),
        rows_of(data),
        (
            "tokens of a row of whole samples, and with the prompt once; seconds of whole samples, ratios to these.",
            f"The limit of layers is the ratio of tokens: {data[1]['tokens'] / data[0]['tokens']:.2f}. Attention's is "
            f"that of the visible pairs: {_pairs(True) / _pairs(False):.2f}.",
            "Differences: of a log-probability, and of the gradient's norm, relative.",
        ),
        data,
        command="python -m benchmarks.rlhf.shared_prefixes",
    )
    finish(record, arguments.output)


if __name__ == "__main__":
    main()

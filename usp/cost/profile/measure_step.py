"""Measuring what a step takes beside its calls: a step of the executor whose models answer at once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import ParallelDims, ParallelMesh, ProcessGroups
from usp.cost.calls.workload import Workload
from usp.rlhf.data.samples import Samples
from usp.rlhf.graph.calls import Generate, Inference, ModelCall, TrainStep
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan
from usp.rlhf.runtime.executor import Executor

from .profile import Timing

STEPS = 8


class _Idle:
    """A `Role` without weights, whose responses have the lengths of a workload."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def weights(self) -> Mapping[str, Tensor]:
        return {}

    def fill(self) -> None: ...

    def allocate(self) -> None: ...

    def release(self) -> None: ...

    def offload(self) -> None: ...

    def load(self) -> None: ...

    def generate(self, prompts: Samples, work: Generate, seed: int) -> Samples:
        found: dict[str, list[Tensor]] = {}
        ids = [prompt * work.group_size + k for prompt in prompts.ids for k in range(work.group_size)]
        for index in ids:
            prompt, length = self._workload.prompts[index], self._workload.sequences[index]
            mask = torch.zeros(length)
            mask[prompt - 1 : length - 1] = 1
            sample = {"tokens": torch.zeros(length, dtype=torch.int64), "mask": mask, "logprobs": torch.zeros(length)}
            sample |= {"finished": torch.tensor(False), "prompt_length": torch.tensor(prompt)}
            for key, value in sample.items():
                found.setdefault(key, []).append(value)
        return Samples(tuple(ids), found)

    def inference(self, samples: Samples, work: Inference, output: str, layout: CallLayout | None = None) -> Samples:
        scored = work.head == "score"
        values = [torch.zeros(() if scored else len(tokens)) for tokens in samples["tokens"]]
        return Samples(samples.ids, {output: values})

    def train_step(self, mini_batches: Sequence[Samples], work: TrainStep) -> Mapping[str, float]:
        return {}


def measure_step(graph: DataflowGraph, workload: Workload, groups: ProcessGroups, device: torch.device) -> Timing:
    """Return the median time of a step without models, all of whose calls are on all ranks. Collective.

    It has the functions between the calls, what the ranks tell each other, and the metrics of the step.
    """
    ranks = tuple(range(dist.get_world_size()))
    dims = ParallelDims(dp_replicate=len(ranks), dp_shard=1)
    plan = ExecutionPlan("without models", {call.name: CallLayout(ranks, dims) for call in graph.calls})

    def build(call: ModelCall, layout: CallLayout, mesh: ParallelMesh) -> _Idle:
        return _Idle(workload)

    executor = Executor(graph, plan, groups, build, device, ranks_per_host=len(ranks))
    number = len(workload.prompts) // graph.group_size
    prompts = [torch.zeros(workload.prompts[index * graph.group_size], dtype=torch.int64) for index in range(number)]
    given = {key: prompts if key == "prompt_ids" else [torch.zeros(())] * number for key in graph.given}
    seconds = []
    for step in range(1, STEPS + 2):
        dist.barrier()
        begin = time.perf_counter()
        executor.run_step(Samples(tuple(range(number)), given), step, step)
        seconds.append(time.perf_counter() - begin)
    longest = torch.tensor(seconds[1:], dtype=torch.float64, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return Timing(longest.median().item(), 0.0)

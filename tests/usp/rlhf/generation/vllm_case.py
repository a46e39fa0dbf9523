"""A run whose responses vLLM decodes, on each rank of torchrun: vllm_case.py FOLDER OPTIONS STEPS.

Every rank writes how the engine's greedy responses compare with our own decoding of the trained weights in one process,
before the first and after the last step; the drift of each step; the bytes that it received for each update, and that
it lacked, and those that it sent to a server; the memory of its engine, awake and asleep, and what of the process's
memory sleeping freed."""

from __future__ import annotations

import json
import os
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from usp.parallel import ParallelDims, ParallelMesh
from usp.rlhf.config import RlhfConfig
from usp.rlhf.generation.decoding import GeneratedResponse
from usp.rlhf.generation.generate import Generator
from usp.rlhf.generation.vllm import ServedEngine, VllmEngine
from usp.rlhf.graph import Generate
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.prepare import prepare
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.runtime.executor import Executor
from usp.rlhf.trainer import RlhfTrainer
from usp.run.launch import Launch, StopRequest, process_group
from usp.run.watchdog import Watchdog

GENERATE, LOAD, RUN = VllmEngine.generate, ServedEngine.load, Executor.run


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def trained_weights(trainer: RlhfTrainer) -> dict[str, Tensor]:
    """All weights of the actor, whole, on every rank."""
    own = trainer.trained["actor"].weights() if "actor" in trainer.trained else {}
    whole = {name: weight.full_tensor() if isinstance(weight, DTensor) else weight for name, weight in own.items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, whole)
    return {name: weight for part in every for name, weight in part.items()}


def facts(response: GeneratedResponse) -> Any:
    """What there is of a response besides its tokens."""
    turns = None if response.turns is None else response.turns.tolist()
    return turns, response.score, list(response.rewards), response.finished


def main(folder: Path, options: dict[str, Any], steps: int) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    launch = Launch(rank, ranks, rank, ranks, rendezvous=True)
    run = prepare(RlhfConfig(output=str(folder / "run"), device="cpu", dtype="float32", **options), launch)
    seen: list[tuple[Any, Generate, Any, Any]] = []
    works = [call.work for call in run.graph.calls if isinstance(call.work, Generate)]
    episodes = works[0].episodes and replace(works[0].episodes, examples=run.held_out, failures=[])

    def recorded(self: VllmEngine, prompts: Any, work: Generate, *others: Any, **partial: Any) -> Any:
        responses = GENERATE(self, prompts, work, *others, **partial)
        seen.append((prompts, replace(work, episodes=None), others, responses))  # of which ranks tell each other
        return responses

    moved: list[tuple[int, int]] = []
    left: list[int] = []

    def loading(self: ServedEngine, pieces: Any) -> int:
        left.append(LOAD(self, pieces))
        return left[-1]

    def moving(self: Executor, *others: Any) -> Any:
        result = RUN(self, *others)
        events = [] if result is None else result.events
        updates = [event for event in events if event.kind == "reallocate" and "generate" in event.name]
        moved.extend((event.received, event.minimum) for event in updates)
        return result

    def compare(trainer: RlhfTrainer) -> dict[str, Any]:
        seen.clear()
        assert trainer.evaluator is not None
        trainer.evaluator.run(0)
        weights, every = trained_weights(trainer), [seen] * ranks
        dist.all_gather_object(every, seen)
        alone = [ParallelMesh.create(ParallelDims(dp_shard=1), "cpu", (each,)) for each in range(ranks)][rank]
        model = RoleModel(run.roles["actor"], CallLayout((rank,), alone.dims), alone)
        model.allocate()
        for name, weight in model.weights().items():
            weight.copy_(weights[name])
        generator, same, difference, answered = Generator.of(model.stage, alone, slots=16), [], 0.0, []
        for prompts, work, others, responses in (call for calls in every for call in calls if rank == 0):
            for wanted, found in zip(
                generator.generate(prompts, replace(work, episodes=episodes), *others), responses, strict=True
            ):
                same.append(torch.equal(wanted.tokens, found.tokens) and facts(wanted) == facts(found))
                answered.append(len(found.rewards))
                if same[-1]:
                    difference = max(difference, (wanted.logprobs - found.logprobs).abs().max().item())
        failures = len(episodes.failures) if episodes else 0
        return {"same": same, "difference": difference, "answered": answered, "failures": failures}

    with (
        process_group(launch, run.device, 300),
        Watchdog(launch, 300, None) as watchdog,
        patch.object(VllmEngine, "generate", recorded),
        patch.object(ServedEngine, "load", loading),
        patch.object(Executor, "run", moving),
    ):
        (folder / "run").mkdir(exist_ok=True)
        trainer = RlhfTrainer(run, launch, StopRequest(), watchdog)
        told: dict[str, Any] = {"before": compare(trainer), "drift": [], "freed": None}
        for number in range(1, steps + 1):
            told["drift"].append(trainer.step(number).metrics["logprob_difference_max"])
        told["after"] = compare(trainer)
        engine = trainer._engine
        if engine is not None and not isinstance(engine, ServedEngine):
            engine.wake()
            for storage in engine._storages():  # which takes memory where it is written
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(1)
            awake, before = engine.nbytes, resident()
            engine.sleep()
            told["freed"] = [awake, engine.nbytes, before - resident()]
        told |= {"moved": moved, "left": left}
        (folder / f"{rank}.json").write_text(json.dumps(told))
        dist.barrier()
        os._exit(0)


main(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]))

"""Stage placement and bubbles agree with torch's schedules; pipeline steps match the gradients of one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.harness.ranks import RankPool
from usp.parallel import (
    PP_SCHEDULES,
    ParallelDims,
    ParallelMesh,
    PipelineSchedule,
    apply_fsdp,
    bubble_fraction,
    micro_batch_violation,
    rank_stages,
    schedule_violation,
    stage_layers,
    stages_violation,
)
from usp.parallel.pipeline import Pipeline
from usp.predict.job import Schedule, actions

schedules = st.sampled_from(PP_SCHEDULES)
interleaved = st.builds(PipelineSchedule, st.just("interleaved-1f1b"), st.integers(2, 8))
RUNS_HERE = [schedule for schedule in PP_SCHEDULES if schedule_violation(schedule, torch.__version__) is None]
degrees = st.integers(1, 16)


@given(st.integers(1, 200), st.integers(1, 64))
def test_layers_are_divided_evenly_with_extra_layers_in_the_middle_stages_first(layers: int, stages: int) -> None:
    if layers < stages:
        with pytest.raises(ValueError, match=f"{layers} layers cannot fill {stages} stages"):
            stage_layers(layers, stages)
        return
    parts = stage_layers(layers, stages)
    assert [layer for part in parts for layer in part] == list(range(layers))
    sizes = [len(part) for part in parts]
    assert len(sizes) == stages and max(sizes) - min(sizes) <= 1
    assert sizes[-1] <= sizes[0] <= min(sizes[1:-1], default=sizes[0])


@given(st.builds(PipelineSchedule, schedules) | interleaved, degrees)
def test_every_stage_is_on_one_rank(schedule: PipelineSchedule, pp: int) -> None:
    held, each = [rank_stages(schedule, pp, rank) for rank in range(pp)], schedule.stages_per_rank
    assert sorted(stage for stages in held for stage in stages) == list(range(pp * each))
    assert all(list(stages) == sorted(stages) and len(stages) == each for stages in held)


@pytest.mark.parametrize(
    ("name", "stages", "said"),
    [
        ("1f1b", 2, "stages per rank of 1f1b must be 1, not 2: use interleaved-1f1b"),
        ("zero-bubble", 1, "stages per rank of zero-bubble must be 2, not 1: use 1f1b"),
        ("zero-bubble", 4, "stages per rank of zero-bubble must be 2, not 4: use interleaved-1f1b"),
        ("interleaved-1f1b", 1, "stages per rank of interleaved-1f1b must be 2 or more, not 1: use 1f1b"),
        ("gpipe", 0, "schedule=gpipe must be one of 1f1b, interleaved-1f1b, zero-bubble"),
    ],
)
def test_only_interleaved_schedules_leave_the_number_of_stages_open(name: str, stages: int, said: str) -> None:
    assert stages_violation(name, stages) == said
    with pytest.raises(ValueError) as caught:
        PipelineSchedule(name, stages)
    assert str(caught.value) == said


def test_schedules_have_as_few_stages_as_they_can() -> None:
    assert [PipelineSchedule(name).stages_per_rank for name in PP_SCHEDULES] == [1, 2, 2]
    assert PipelineSchedule("interleaved-1f1b") == PipelineSchedule("interleaved-1f1b", 2)


@given(schedules, degrees, st.integers(1, 100))
def test_a_refusal_suggests_a_valid_number_of_micro_batches(schedule: str, pp: int, number: int) -> None:
    violation = micro_batch_violation(schedule, pp, number)
    if violation is None:
        assert number >= pp
        return
    assert str(number) in violation
    suggested = int(violation.split("use ")[1])
    assert suggested > number and micro_batch_violation(schedule, pp, suggested) is None


# torch's schedules

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
PREDICTED = {"forward": "F", "backward": "B", "inputs": "I", "weights": "W"}


class Recorded(nn.Module):
    """A stage that records its forwards and backwards."""

    def __init__(self, stage: int, last: bool) -> None:
        super().__init__()
        self.linear, self.stage, self.last = nn.Linear(1, 1), stage, last
        self.actions: list[tuple[str, int, int]] = []

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        number = sum(kind == "F" for kind, _, _ in self.actions)
        self.actions.append(("F", self.stage, number))
        out = self.linear(x) * scale
        out.register_hook(lambda grad: self.actions.append(("B", self.stage, number)))
        return out.sum() if self.last else out


def order_of(schedule: PipelineSchedule, micro_batches: int) -> list[tuple[str, int, int]]:
    """Return this rank's actions in order: (forward, backward or one of its halves, stage, micro-batch)."""
    pp = dist.get_world_size()
    mesh = ParallelMesh.create(ParallelDims(pp=pp))
    stages = [Recorded(stage, stage == pp - 1) for stage in rank_stages(schedule, pp, mesh.rank("pp"))]
    pipeline = Pipeline(stages, mesh, schedule, micro_batches=micro_batches, stage_outputs=[torch.empty(1, 1)], zero=0)
    if schedule.name == "1f1b":  # torch exposes the order only of the other two
        pipeline.step(torch.randn(micro_batches, 1), scale=0.5)
        return stages[0].actions
    order = pipeline._schedule.pipeline_order[mesh.rank("pp")]
    computed = [action for action in order if action is not None]
    return [(KINDS[one.computation_type.name], one.stage_index, one.microbatch_index) for one in computed]


def idle_part(order: dict[int, list[tuple[str, int, int]]]) -> float:
    """Return the idle fraction of the ranks' time if a stage's forward takes 1 and its backward 2, or 1 per half."""
    seconds = {"F": 1, "B": 2, "I": 1, "W": 1}
    done: dict[tuple[str, int, int], int] = {}
    clock, left = dict.fromkeys(order, 0), {rank: list(actions) for rank, actions in order.items()}
    last = max(stage for actions in order.values() for _, stage, _ in actions)

    def needs(kind: str, stage: int, number: int) -> list[tuple[str, int, int]]:
        if kind == "F":
            return [("F", stage - 1, number)] if stage else []
        if kind == "W":
            return [("I", stage, number)]
        return [("F", stage, number)] + ([(kind, stage + 1, number)] if stage < last else [])

    while any(left.values()):
        ready = [rank for rank in left if left[rank] and all(need in done for need in needs(*left[rank][0]))]
        assert ready, "the schedule deadlocks"
        for rank in ready:
            action = left[rank].pop(0)
            clock[rank] = max([clock[rank], *(done[need] for need in needs(*action))]) + seconds[action[0]]
            done[action] = clock[rank]
    work = sum(seconds[kind] for actions in order.values() for kind, _, _ in actions)
    return 1 - work / (len(order) * max(clock.values()))


@pytest.mark.parametrize(
    ("name", "stages", "pp", "micro_batches"),
    [
        *(("interleaved-1f1b", 4, 2, 4), ("interleaved-1f1b", 2, 2, 4), ("interleaved-1f1b", 3, 4, 10)),
        *(("1f1b", 1, 2, 2), ("1f1b", 1, 4, 7)),
        *([("zero-bubble", 2, 2, 3), ("zero-bubble", 2, 4, 9)] if "zero-bubble" in RUNS_HERE else []),
    ],
)
@pytest.mark.slow(but=1)
def test_bubbles_match_torchs_schedules(ranks: RankPool, name: str, stages: int, pp: int, micro_batches: int) -> None:
    schedule = PipelineSchedule(name, stages)
    order = dict(enumerate(ranks.run(order_of, pp, schedule, micro_batches)))
    for rank, found in order.items():
        assert {stage for _, stage, _ in found} == set(rank_stages(schedule, pp, rank))
        predicted = actions(Schedule(schedule, rank, pp, micro_batches))
        assert found == [(PREDICTED[kind], stage, number) for kind, stage, number in predicted]
    assert idle_part(order) == pytest.approx(bubble_fraction(schedule, pp, micro_batches))


@given(interleaved, st.integers(2, 6), st.integers(1, 14))
def test_more_stages_shrink_the_bubble_and_what_is_in_flight(
    schedule: PipelineSchedule, pp: int, micro_batches: int
) -> None:
    """As arXiv 2104.04473, section 2.2.2, and arXiv 2205.05198, section 4.2.3, say: idle are (p - 1) / (v m) of the
    work, and the first rank has activations of p (1 + (p - 1) / (p v)) micro-batches."""
    if micro_batch_violation(schedule.name, pp, micro_batches):
        return
    each, work = schedule.stages_per_rank, schedule.stages_per_rank * micro_batches
    made = {rank: actions(Schedule(schedule, rank, pp, micro_batches)) for rank in range(pp)}
    order = {rank: [(PREDICTED[kind], *where) for kind, *where in found] for rank, found in made.items()}
    idle = idle_part(order)
    assert idle / (1 - idle) == pytest.approx((pp - 1) / work)
    assert idle == pytest.approx(bubble_fraction(schedule, pp, micro_batches))
    for rank, found in made.items():
        live = max(accumulate(1 if action.kind == "forward" else -1 for action in found))
        together = micro_batches // (micro_batches // pp)  # pass a stage before the next
        assert live == min((each - 1) * together + 2 * (pp - 1 - rank) + 1, work)
    if micro_batches % pp == 0 and micro_batches > pp:
        first = max(accumulate(1 if action.kind == "forward" else -1 for action in made[0]))
        assert first / each == pytest.approx(pp * (1 + (pp - 1) / (pp * each)))


# A step

ROWS, WIDTH, BLOCKS, MICRO_BATCHES = 8, 6, 8, 4
SHARDED, REPLICATED = ParallelDims(pp=2, dp_shard=2), ParallelDims(pp=2, dp_replicate=2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(torch.tanh(self.linear(x))))  # a weight that is used twice


class Stage(nn.Module):
    """Blocks, with a float32 sum that is passed along with the hidden states and carries gradient."""

    def __init__(self, blocks: list[nn.Module], first: bool, last: bool) -> None:
        super().__init__()
        self.blocks, self.first, self.last = nn.ModuleList(blocks), first, last

    def forward(self, x: Tensor, total: Tensor | None = None, *, wanted: Tensor, scale: float) -> object:
        if total is None:
            total = torch.full((2, 3), 257.0)  # bfloat16 would round it to 256
        assert total.dtype == torch.float32
        for block in self.blocks:
            x = block(x)
            total = total + x.float().mean()
        if not self.last:
            return x, total
        return ((x.float() - wanted).square().sum() + total.square().sum() / 257) * scale


@dataclass
class Seen:
    """State of FSDP2 at each block's forward: number of unsharded blocks, and of blocks with sharded gradients."""

    whole: list[int] = field(default_factory=list)
    scattered: list[int] = field(default_factory=list)


def blocks_and_batch() -> tuple[list[nn.Module], Tensor, Tensor]:
    torch.manual_seed(0)
    return [Block() for _ in range(BLOCKS)], torch.randn(2 * ROWS, WIDTH), torch.randn(2 * ROWS, WIDTH)


def step(
    dims: ParallelDims, schedule: PipelineSchedule, zero: int, dtype: torch.dtype
) -> tuple[float, dict[int, list[Tensor]], Seen]:
    """Return loss, gradients by block, and the observed FSDP2 states of one of 2 x 2 ranks."""
    mesh = ParallelMesh.create(dims)
    blocks, x, target = blocks_and_batch()
    indices, seen, stages = rank_stages(schedule, 2, mesh.rank("pp")), Seen(), []
    layers = stage_layers(BLOCKS, 2 * len(indices))
    for index in indices:
        stage = Stage([blocks[i] for i in layers[index]], index == 0, index == len(layers) - 1)
        apply_fsdp(stage, mesh, stage.blocks, zero=zero, param_dtype=dtype)
        stages.append(stage)

    def look(module: nn.Module, args: tuple) -> None:
        held = [block.linear.weight for stage in stages for block in stage.blocks]
        seen.whole.append(sum(not isinstance(weight, DTensor) for weight in held))
        seen.scattered.append(sum(isinstance(weight, DTensor) and weight.grad is not None for weight in held))

    for stage in stages:
        for block in stage.blocks:
            block.register_forward_pre_hook(look)
    rows = slice(mesh.rank("batch") * ROWS, (mesh.rank("batch") + 1) * ROWS)
    outputs = [torch.empty(ROWS // MICRO_BATCHES, WIDTH, dtype=dtype), torch.empty(2, 3)]
    pipeline = Pipeline(stages, mesh, schedule, micro_batches=MICRO_BATCHES, stage_outputs=outputs, zero=zero)
    loss = sum(pipeline.step(x[rows], wanted=target[rows], scale=0.1).item() for _ in range(2))
    held = [i for index in indices for i in layers[index]]
    grads = {i: [p.grad.full_tensor() for p in blocks[i].parameters()] for i in held}
    return loss, grads, seen


def reference_step() -> tuple[float, dict[int, list[Tensor]]]:
    blocks, x, target = blocks_and_batch()
    stage, total = Stage(blocks, True, True), torch.zeros(())
    for _ in range(2):
        for part, wanted in zip(x.chunk(2 * MICRO_BATCHES), target.chunk(2 * MICRO_BATCHES), strict=True):
            loss = stage(part, wanted=wanted, scale=0.1)
            loss.backward()
            total += loss.detach()
    return total.item(), {i: [p.grad for p in block.parameters()] for i, block in enumerate(blocks)}


@pytest.mark.parametrize(
    ("dims", "name", "stages", "zero", "dtype", "tolerance"),
    [
        case
        for case in (
            (SHARDED, "interleaved-1f1b", 4, 3, torch.float32, 1e-5),
            (SHARDED, "1f1b", 1, 3, torch.float32, 1e-5),
            (SHARDED, "1f1b", 1, 1, torch.float32, 1e-5),
            (REPLICATED, "interleaved-1f1b", 2, 2, torch.float32, 1e-5),
            (REPLICATED, "interleaved-1f1b", 3, 1, torch.float32, 1e-5),
            (SHARDED, "zero-bubble", 2, 1, torch.float32, 1e-5),
            (SHARDED, "1f1b", 1, 3, torch.bfloat16, 3e-2),
            (REPLICATED, "zero-bubble", 2, 0, torch.bfloat16, 3e-2),
        )
        if case[1] in RUNS_HERE
    ],
    ids=str,
)
@pytest.mark.slow(but=1)
def test_gradients_are_summed_over_micro_batches_and_ranks(
    ranks: RankPool, dims: ParallelDims, name: str, stages: int, zero: int, dtype: torch.dtype, tolerance: float
) -> None:
    found = ranks.run(step, 4, dims, PipelineSchedule(name, stages), zero, dtype)
    loss, wanted = reference_step()
    assert sum(part for part, _, _ in found) == pytest.approx(loss, rel=tolerance)
    for _, grads, _ in found:
        for block, parts in grads.items():
            for part, whole in zip(parts, wanted[block], strict=True):
                torch.testing.assert_close(part, whole, rtol=tolerance, atol=tolerance * whole.abs().max().item())
    assert {block for _, grads, _ in found for block in grads} == set(range(BLOCKS))


@pytest.mark.slow
def test_zero_3_gathers_one_block_at_a_time_and_reduce_scatters_immediately(ranks: RankPool) -> None:
    for _, _, seen in ranks.run(step, 4, SHARDED, PipelineSchedule("1f1b"), 3, torch.float32):
        assert max(seen.whole) == 1
        held = BLOCKS // 2
        assert seen.scattered[held * MICRO_BATCHES - 1] == held - 1, "the blocks that are not running"


def wrong_pipelines() -> list[str]:
    mesh = ParallelMesh.create(ParallelDims(pp=2))
    stages, messages = [nn.Linear(1, 1) for _ in range(2)], []
    for stage in stages:
        apply_fsdp(stage, mesh, [])
    for micro_batches, zero in ((4, 3), (2, 1)):
        with pytest.raises(ValueError) as caught:
            outputs = [torch.empty(1)]
            Pipeline(
                stages,
                mesh,
                PipelineSchedule("zero-bubble"),
                micro_batches=micro_batches,
                stage_outputs=outputs,
                zero=zero,
            )
        messages.append(str(caught.value))
    return messages


def test_unsupported_schedules_are_refused(ranks: RankPool) -> None:
    for messages in ranks.run(wrong_pipelines, 2):
        if "zero-bubble" not in RUNS_HERE:
            assert all("zero-bubble needs torch 2.13 or newer" in message for message in messages)
            continue
        assert messages[0].startswith("zero=3 frees parameters") and messages[0].endswith("use zero=1")
        assert "at least 2 x 2 - 1 = 3, not 2: use 3" in messages[1]


@pytest.mark.parametrize(
    ("version", "runs"), [("2.11.0+cu130", False), ("2.12.1", False), ("2.13.0", True), ("3.0", True)]
)
def test_a_torch_that_cannot_split_a_backward_is_refused(version: str, runs: bool) -> None:
    assert (schedule_violation("zero-bubble", version) is None) == runs
    assert schedule_violation("1f1b", version) is schedule_violation("interleaved-1f1b", version) is None

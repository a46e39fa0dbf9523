"""Training steps through pipeline stages are those of one process; each stage holds what is its own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import RankPool
from tests.usp.tiny import CONFIGS, FEW_STEPS, MAX_NORM, ROWS, SIZES, optimiser, packed_batch, tiny_model, train_alone
from usp import apply_unified_sp, shard_batch
from usp.hf.integrate import decoder_layers
from usp.hf.prune import prune_to_stage
from usp.hf.stage import CausalLMStage
from usp.losses import NextTokenLoss
from usp.parallel import (
    ParallelDims,
    ParallelMesh,
    PipelineSchedule,
    apply_fsdp,
    clip_grad_norm,
    rank_stages,
    stage_layers,
)
from usp.sp.sequence import IGNORED_LABEL
from usp.train.passes import PipelineRunner, joined

MICRO_BATCHES = 4
LAYERS = {family: CONFIGS[family]().num_hidden_layers for family in ("llama-deep", "llama-eight", "qwen2-deep")}


@dataclass(frozen=True)
class Break:
    """A mistake to make on purpose."""

    drop: bool = False  # leave a micro-batch out
    scale: bool = False  # average gradients over micro-batches


def stages_of(family: str, mesh: ParallelMesh, schedule: PipelineSchedule, zero: int) -> list[CausalLMStage]:
    indices, stages = rank_stages(schedule, mesh.size("pp"), mesh.rank("pp")), []
    layers = stage_layers(LAYERS[family], mesh.size("pp") * len(indices))
    for index in indices:
        first, last = index == 0, index == len(layers) - 1
        model = tiny_model(family)
        prune_to_stage(model, layers[index], first, last)
        apply_unified_sp(model, mesh, "zigzag")
        stage = CausalLMStage(model, mesh, first=first, last=last, loss_chunk=64)
        apply_fsdp(stage, mesh, decoder_layers(model), zero=zero)
        stages.append(stage)
    return stages


def train_pipelined(
    family: str, dims: ParallelDims, schedule: PipelineSchedule, zero: int, broken: Break
) -> tuple[list[tuple[float, float]], list[str]]:
    """(loss, gradient norm) of each step, and the names of this rank's parameters."""
    mesh = ParallelMesh.create(dims)
    stages = stages_of(family, mesh, schedule, zero)
    runner = PipelineRunner(stages, mesh, schedule, zero, SIZES["hidden_size"], torch.float32)
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    optimizer, history = optimiser(torch.nn.ModuleList(stages)), []
    share = ROWS // mesh.size("batch")
    for step in range(FEW_STEPS):
        rows = slice(mesh.rank("batch") * share, (mesh.rank("batch") + 1) * share)
        local = shard_batch({key: value[rows] for key, value in packed_batch(step).items()}, mesh, "zigzag")
        tokens = (local["shift_labels"] != IGNORED_LABEL).sum()
        dist.all_reduce(tokens, group=mesh.group("loss"))
        if broken.drop:
            local["shift_labels"][-1:] = IGNORED_LABEL
        size = share // MICRO_BATCHES
        cuts = [slice(first, first + size) for first in range(0, share, size)]
        loss = runner.forward_backward(
            [{k: v[cut] for k, v in local.items()} for cut in cuts], NextTokenLoss(int(tokens))
        )
        if broken.scale:
            for parameter in parameters:
                parameter.grad /= MICRO_BATCHES
        norm = clip_grad_norm(parameters, MAX_NORM, mesh)
        optimizer.step()
        optimizer.zero_grad()
        for axis in ("pp", "loss"):
            dist.all_reduce(loss, group=mesh.group(axis))
        history.append((loss.item(), norm))
    return history, [name for stage in stages for name, _ in stage.named_parameters()]


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> dict[str, list[tuple[float, float]]]:
    return {family: ranks.run(train_alone, 1, family, FEW_STEPS)[0] for family in LAYERS}


def largest_difference(found: list, alone: list[tuple[float, float]]) -> float:
    """Of any loss or gradient norm of any step on any rank, relative."""
    histories = torch.tensor([history for history, _ in found], dtype=torch.float64)
    return float((histories / torch.tensor(alone, dtype=torch.float64) - 1).abs().max())


def parameters_of(family: str, stage: int, num_stages: int) -> set[str]:
    """What a stage has to hold of a model whose layers go evenly, from their names alone."""
    each = LAYERS[family] // num_stages
    owners = {f"model.layers.{layer}.": layer // each for layer in range(LAYERS[family])}
    owners |= {"model.embed_tokens.": 0, "model.norm.": num_stages - 1, "lm_head.": num_stages - 1}
    names = [name for name, _ in tiny_model(family).named_parameters()]
    return {f"model.{name}" for name in names if owners[next(p for p in owners if name.startswith(p))] == stage}


CASES = [
    ("llama-eight", ParallelDims(pp=2, ulysses=2), "interleaved-1f1b", 4, 3),
    ("llama-deep", ParallelDims(pp=2, ring=2), "zero-bubble", 2, 1),
    ("llama-deep", ParallelDims(pp=2, ring=2), "1f1b", 1, 3),
    ("qwen2-deep", ParallelDims(pp=2, ulysses=2), "interleaved-1f1b", 2, 3),
]


@pytest.mark.parametrize(
    ("family", "dims", "name", "each", "zero"), CASES, ids=lambda value: str(value).replace(" ", "-")
)
@pytest.mark.slow(full=2)
def test_steps_are_those_of_one_process(
    ranks: RankPool, alone: dict, family: str, dims: ParallelDims, name: str, each: int, zero: int
) -> None:
    schedule = PipelineSchedule(name, each)
    found = ranks.run(train_pipelined, dims.pp * dims.sp, family, dims, schedule, zero, Break())
    assert largest_difference(found, alone[family]) <= 1e-5
    if family.startswith("llama"):
        for rank, (_, names) in enumerate(found):
            stages = rank_stages(schedule, 2, rank // dims.sp)
            assert set(names) == set().union(*(parameters_of(family, stage, 2 * each) for stage in stages))


@pytest.mark.parametrize("broken", [Break(drop=True), Break(scale=True)], ids=str)
def test_a_broken_step_is_seen(ranks: RankPool, alone: dict, broken: Break) -> None:
    found = ranks.run(train_pipelined, 2, "llama-deep", ParallelDims(pp=2), PipelineSchedule("1f1b"), 3, broken)
    assert largest_difference(found, alone["llama-deep"]) > 1e-3


def test_a_stage_on_the_meta_device_is_a_pass_through_where_other_stages_have_layers() -> None:
    with torch.device("meta"):
        model = tiny_model("llama-deep")
    prune_to_stage(model, range(1, 3), first=False, last=False)
    assert {name.split(".")[2] for name, _ in model.named_parameters()} == {"1", "2"}
    assert len(decoder_layers(model)) == 2
    hidden = torch.randn(1, 5, 32)
    assert model.model.layers[0](hidden, position_ids=None) is hidden
    assert model.model.norm(hidden) is hidden


def test_what_cannot_be_a_stage_is_refused() -> None:
    shared = tiny_model("llama")
    shared.model.layers[1].mlp = shared.model.layers[0].mlp
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate_proj\.weight and .* are one parameter"):
        prune_to_stage(shared, range(1), first=True, last=False)


def test_micro_batches_join_to_the_batch_they_came_from() -> None:
    ids = torch.arange(12).view(4, 3)
    short, long = torch.tensor([0, 2, 3]), torch.tensor([[0, 1, 2, 3], [0, 3, 3, 3]])
    whole = joined([{"input_ids": ids[:2], "cu_seqlens": short}, {"input_ids": ids[2:], "cu_seqlens": long}])
    assert torch.equal(whole["input_ids"], ids)
    assert whole["cu_seqlens"].tolist() == [[0, 2, 3, 3], [0, 2, 3, 3], [0, 1, 2, 3], [0, 3, 3, 3]]
    with pytest.raises(ValueError, match=r"\(1, 3\), \(3, 3\)"):
        joined([{"input_ids": ids[:1]}, {"input_ids": ids[1:]}])

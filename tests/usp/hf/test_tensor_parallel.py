"""Tensor-parallel models train as on a single process and communicate as planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedModel, Qwen3MoeConfig

from tests.harness.ranks import RankPool
from tests.usp.tiny import (
    CONFIGS,
    FEW_STEPS,
    MAX_NORM,
    ROWS,
    SEQ_LEN,
    SIZES,
    STEPS,
    VOCAB,
    optimiser,
    packed_batch,
    tiny_model,
    train_alone,
)
from tests.usp.train.test_parity import largest_difference
from usp import apply_unified_sp, shard_batch
from usp.hf.integrate import decoder_layers
from usp.hf.prune import prune_to_stage
from usp.hf.tensor_parallel import apply_tp, plan_violations, tp_plan
from usp.losses import causal_lm_loss, global_token_count
from usp.parallel import ParallelDims, ParallelMesh, apply_fsdp, clip_grad_norm
from usp.parallel.tensor import STYLES, tensor_parallel_violations
from usp.parallel.wire import SentBytes


@dataclass(frozen=True)
class Case:
    family: str
    dims: ParallelDims
    sequence_parallel: bool = True
    zero: int = 3
    broken: str = ""  # a module whose gradient is a part on each rank, and is not summed

    def __str__(self) -> str:
        return f"{self.family}-{self.dims}{'-sequence' * self.sequence_parallel}-zero{self.zero}".replace(" ", "-")


CASES = [
    Case("llama-tied", ParallelDims(tp=4)),
    # outputs that are gathered: norms over all heads, and fused projections
    Case("olmo2", ParallelDims(tp=2, ring=2), sequence_parallel=False),
    Case("phi3", ParallelDims(tp=2, ulysses=2)),
    # with --exhaustive
    Case("qwen3", ParallelDims(tp=2, ring=2), sequence_parallel=False),
    Case("qwen2", ParallelDims(tp=2, ulysses=2)),
    Case("qwen3", ParallelDims(tp=2, dp_replicate=2), zero=0),
]


class Root(nn.Module):
    """Model that computes the loss from hidden states and the head's weight."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, targets: Tensor, tokens: Tensor, **inputs: Tensor) -> Tensor:
        weight = self.model.lm_head.weight
        hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        return causal_lm_loss(hidden @ weight.full_tensor().T, targets, tokens)


def train(case: Case, steps: int = FEW_STEPS) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of each step."""
    mesh = ParallelMesh.create(case.dims)
    model = apply_unified_sp(tiny_model(case.family), mesh, "zigzag")
    if case.broken:
        model.config.base_model_tp_plan = model.config.base_model_tp_plan | {case.broken: "untouched"}
    apply_tp(model, mesh, case.sequence_parallel)
    root = Root(model)
    apply_fsdp(root, mesh, decoder_layers(model), zero=case.zero)
    optimizer, history = optimiser(root), []
    share = ROWS // mesh.size("batch")
    rows = slice(mesh.rank("batch") * share, (mesh.rank("batch") + 1) * share)
    for step in range(steps):
        local = shard_batch({key: value[rows] for key, value in packed_batch(step).items()}, mesh, "zigzag")
        targets = local.pop("shift_labels")
        loss = root(targets, global_token_count(targets, mesh), **local)
        optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm(root.parameters(), MAX_NORM, mesh)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=mesh.group("loss"))
        history.append((total.item(), norm))
    return history


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> Callable[[str], list[tuple[float, float]]]:
    return cache(lambda family: ranks.run(train_alone, 1, family)[0])


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.slow(full=3)
def test_steps_match_a_single_process(ranks: RankPool, alone: Callable[[str], Any], case: Case) -> None:
    size = case.dims.tp * case.dims.sp * case.dims.dp_replicate * abs(case.dims.dp_shard)
    found = ranks.run(train, size, case)
    assert largest_difference(found, alone(case.family)) <= 1e-5


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
@pytest.mark.slow(but=1)
def test_missing_gradient_reduction_is_detected(ranks: RankPool, alone: Callable[[str], Any], family: str) -> None:
    case = Case(family, ParallelDims(tp=2), sequence_parallel=False, broken="layers.*.self_attn.q_norm")
    assert largest_difference(ranks.run(train, 2, case, STEPS), alone(family)) > 1e-4


def bytes_of_a_layer() -> dict[str, int]:
    mesh = ParallelMesh.create(ParallelDims(tp=2))
    model = apply_unified_sp(tiny_model("qwen3"), mesh, "zigzag")
    apply_tp(model, mesh, sequence_parallel=True)
    hidden = torch.rand(ROWS, SEQ_LEN // 2, SIZES["hidden_size"])
    position_ids = torch.arange(SEQ_LEN).expand(ROWS, -1)
    embeddings = model.base_model.rotary_emb(hidden, position_ids)
    with torch.no_grad(), SentBytes() as sent:
        out = decoder_layers(model)[0](hidden, position_ids=position_ids, position_embeddings=embeddings)
    assert out.shape == hidden.shape
    return {name: count for name, count in sent.by_op.items() if count}


def test_layer_gathers_twice_and_scatters_twice(ranks: RankPool) -> None:
    hidden = ROWS * SEQ_LEN * SIZES["hidden_size"] * 4  # bytes; a rank of two sends one half of it each time
    expected = {"all_gather_into_tensor": 2 * hidden // 2, "reduce_scatter_tensor": 2 * hidden // 2}
    assert ranks.run(bytes_of_a_layer, 2) == [expected] * 2


def error_of_a_middle_stage() -> float:
    """Return the error of hidden states of a stage without embedding, norm and first layer."""
    mesh = ParallelMesh.create(ParallelDims(tp=2))
    model, whole = (apply_unified_sp(tiny_model("qwen3"), mesh, "zigzag") for _ in range(2))
    base = model.base_model
    prune_to_stage(model, range(1, 2), first=False, last=False)
    base._forward_hooks.clear()  # the guard that counts layers
    apply_tp(model, mesh, sequence_parallel=True)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    inputs = shard_batch(packed_batch(0), mesh, "zigzag")
    inputs.pop("shift_labels")
    first: list[Tensor] = []
    decoder_layers(whole)[1].register_forward_pre_hook(lambda module, args: first.append(args[0]))
    whole.base_model.norm = nn.Identity()
    wanted = whole.base_model(**inputs).last_hidden_state.chunk(2, 1)[mesh.rank("tp")]
    inputs["inputs_embeds"] = first[0].chunk(2, 1)[mesh.rank("tp")]
    del inputs["input_ids"]
    found = base(**inputs).last_hidden_state
    return ((found - wanted).norm() / wanted.norm()).item()


def test_middle_stage_takes_and_returns_token_shards(ranks: RankPool) -> None:
    for error in ranks.run(error_of_a_middle_stage, 2):
        assert error < 1e-5


EXPERTS = {
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, moe_intermediate_size=16, num_experts_per_tok=2
    ),
}


def error_of_a_layer_of_experts(family: str) -> float:
    """Return the relative errors of the output and every gradient; experts' gradients are summed manually."""
    mesh = ParallelMesh.create(ParallelDims(tp=2))
    torch.manual_seed(0)
    models = [AutoModelForCausalLM.from_config(EXPERTS[family](), attn_implementation="eager") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    apply_tp(models[0], mesh, sequence_parallel=True)
    layers = [decoder_layers(model)[0] for model in models]
    hidden, weight = torch.rand(2, ROWS, SEQ_LEN, SIZES["hidden_size"])
    context = {
        "position_embeddings": models[1].base_model.rotary_emb(hidden, torch.arange(SEQ_LEN).expand(ROWS, -1)),
        "attention_mask": torch.full((SEQ_LEN, SEQ_LEN), -torch.inf).triu(1).expand(ROWS, 1, -1, -1),
    }
    own = [x.chunk(2, 1)[mesh.rank("tp")] for x in (hidden, weight)]
    found, wanted = layers[0](own[0], **context), layers[1](hidden, **context)
    (found * own[1]).sum().backward()
    (wanted * weight).sum().backward()
    pairs = [(found, wanted.chunk(2, 1)[mesh.rank("tp")])]
    for (name, p), alone in zip(layers[0].named_parameters(), layers[1].parameters(), strict=True):
        assert isinstance(p, DTensor) != ("experts" in name)
        if not isinstance(p, DTensor):
            dist.all_reduce(p.grad)
        pairs.append((p.grad.full_tensor() if isinstance(p, DTensor) else p.grad, alone.grad))
    return torch.stack([(f - w).norm() / w.norm() for f, w in pairs]).max().item()


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.slow(but=1)
def test_experts_are_not_sharded_over_tp(ranks: RankPool, family: str) -> None:
    for error in ranks.run(error_of_a_layer_of_experts, 2, family):
        assert error < 1e-5


def on_meta() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS["llama-tied"]())
    names = [name for name, _ in model.named_parameters()]
    apply_tp(model, ParallelMesh.create(ParallelDims(tp=2)), sequence_parallel=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert [name for name, _ in model.named_parameters()] == names
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    model.to_empty(device="cpu")
    assert model.lm_head.weight.to_local().shape == (VOCAB // 2, SIZES["hidden_size"])


def test_meta_device_and_tied_weights_are_preserved(ranks: RankPool) -> None:
    ranks.run(on_meta, 2)


def test_unsupported_plans_are_rejected() -> None:
    config = LlamaConfig()
    assert plan_violations(config) == plan_violations(MixtralConfig()) == plan_violations(Qwen3MoeConfig()) == []
    config.base_model_tp_plan = {"layers.*.self_attn.kv_a": "packed_colwise"}
    assert "'packed_colwise' of layers.*.self_attn.kv_a is not supported" in str(plan_violations(config)[0])
    config.base_model_tp_plan = None
    assert "model_type='llama': transformers ships none; use tp=1" in str(plan_violations(config)[0])


def test_plans_that_name_the_embedding_are_known() -> None:
    """As transformers before 5.23 does for models with a tied one."""
    model = tiny_model("qwen3")
    model.config.base_model_tp_plan = {**model.config.base_model_tp_plan, "embed_tokens": "embedding_rowwise"}
    assert plan_violations(model.config) == [] and tensor_parallel_violations(model, 2, tp_plan(model)) == []
    for style in STYLES:
        model.config.base_model_tp_plan = {"layers.*.mlp": style}
        assert plan_violations(model.config) == []


def test_what_a_plan_omits_is_said_once_for_all_layers() -> None:
    model = tiny_model("qwen3")
    plan = {name: style for name, style in tp_plan(model).items() if not name.endswith("q_norm")}
    (said,) = tensor_parallel_violations(model, 2, plan)
    assert "model.layers.0.self_attn.q_norm.weight" in said and "the plan must name" in said

"""Tiny hybrid models, and their outputs and gradients on a sharded sequence beside those of each document alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from tests.harness.ranks import on_first_rank
from usp import UnifiedSPAttention, shard_sequence, unshard_sequence
from usp.hf.mixers import apply_mixers
from usp.parallel import ParallelDims, ParallelMesh

VOCAB, ROWS, SEQ_LEN = 48, 2, 64
# The documents of two rows. They end inside spans, one has a single token, and the last row ends in padding.
PACKED = ((0, 5, 24, 25, 64), (0, 33, 40, 59, 59))
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = ["linear_attention", "full_attention"]
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "head_dim": 8,
    "layer_types": KINDS,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA2 = {"mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 4, "mamba_chunk_size": 8}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "layer_types": KINDS,
    "mlp_layer_types": ["dense", "sparse"],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA | EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": DELTA,
    "olmo_hybrid": DELTA,
    "kimi_linear": LATENT | {"num_local_experts": 4, "linear_head_dim": 6, "linear_num_heads": 4},
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "num_hidden_layers": 3,
        "head_dim": 8,
        "ssm_state_size": 4,
        "mamba_num_heads": 6,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "granitemoehybrid": MAMBA2
    | {"num_local_experts": 4, "shared_intermediate_size": 16, "layer_types": KINDS, "position_embedding_type": "rope"},
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 48},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "n_mamba_heads": 6,
        "mamba_d_state": 4,
        "mamba_ngroups": 2,
        "chunk_size": 8,
        "num_key_value_heads": 4,
    },
    "mamba2": {"num_heads": 6, "head_dim": 8, "state_size": 4, "n_groups": 2, "chunk_size": 8},
    "minimax": {"layer_types": KINDS, "head_dim": 8, "block_size": 5, "num_local_experts": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
    "mamba": {"state_size": 4, "time_step_rank": 4},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
}


def hybrid(family: str, **changes: Any) -> PreTrainedModel:
    """Return a model whose states last for many tokens; as transformers draws them, most decay within one.

    changes: of its configuration.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family] | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                parameter.copy_(0.5 * drawn - 3)
            elif parameter.ndim == 1:
                parameter.add_(0.1 * drawn)
            else:
                parameter.copy_(drawn * (1.0 if "embed" in name else 0.8 / parameter[0].numel() ** 0.5))
    return model


def sharded(model: PreTrainedModel, mesh: ParallelMesh, layout: str) -> PreTrainedModel:
    """Shard the model's recurrent layers, and its attention, as far as these models need it."""
    apply_mixers(model, mesh, layout)
    attention = UnifiedSPAttention(mesh, layout)

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, **kwargs: Any) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attention(q, k, v, scale=kwargs["scaling"], cu_seqlens=kwargs.get("cu_seqlens")), None

    AttentionInterface.register("hybrid_test", attend)
    AttentionMaskInterface.register("hybrid_test", lambda *args, **kwargs: None)
    model.set_attn_implementation("hybrid_test")
    return model


def boundaries(packed: bool) -> tuple[tuple[int, ...], ...]:
    return PACKED if packed else ((0, SEQ_LEN),) * ROWS


def documents_alone(model: PreTrainedModel, ids: Tensor, cu_seqlens: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return the last hidden states of each document in its own forward, zero for padding."""
    rows = []
    for row, cuts in zip(ids, cu_seqlens, strict=True):
        pieces = [(begin, end) for begin, end in pairwise(cuts) if begin < end]
        outs = [model.base_model(row[None, b:e], use_cache=False).last_hidden_state[0] for b, e in pieces]
        rows.append(torch.cat((*outs, outs[0].new_zeros(len(row) - cuts[-1], outs[0].shape[-1]))))
    return torch.stack(rows)


def errors(family: str, ring: int, ulysses: int, layouts: tuple[str, ...]) -> dict[str, float]:
    """Return the largest relative errors of outputs and of gradients, by layout and by packing. Run it on all ranks."""
    mesh = ParallelMesh.create(ParallelDims(ring=ring, ulysses=ulysses))
    found: dict[str, float] = {}
    for packed in (False, True):
        cu_seqlens = boundaries(packed)
        ids, weight, want, gradients = on_first_rank(alone, family, cu_seqlens)
        starts = torch.tensor([[max(c for c in cuts if c <= p) for p in range(SEQ_LEN)] for cuts in cu_seqlens])
        positions = torch.arange(SEQ_LEN) - starts
        for layout in layouts:
            model = sharded(hybrid(family), mesh, layout)
            documents = {"cu_seqlens": torch.tensor(cu_seqlens)} if packed else {}
            divided = {"cu_seqlens": torch.tensor(cu_seqlens)}
            own_ids, own_positions, own_weight = (
                shard_sequence(x, mesh, layout, **divided) for x in (ids, positions, weight)
            )
            out = model.base_model(own_ids, position_ids=own_positions, use_cache=False, **documents).last_hidden_state
            (out * own_weight).sum().backward()
            real = want != 0
            got = unshard_sequence(out.detach(), mesh, layout, **divided) * real
            key = f"{layout} {'packed' if packed else 'plain'}"
            found[f"{key} output"] = relative(got, want)
            for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
                if gradient is not None:
                    assert parameter.grad is not None, name
                    dist.all_reduce(parameter.grad)
                    found[f"{key} {name}"] = relative(parameter.grad, gradient)
    return found


def alone(family: str, cu_seqlens: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Return ids, weights of outputs, outputs of each document alone, and the gradients of their weighted sum."""
    generator = torch.Generator().manual_seed(1)
    ids, model = torch.randint(3, VOCAB, (ROWS, SEQ_LEN), generator=generator), hybrid(family)
    want = documents_alone(model, ids, cu_seqlens)
    weight = torch.randn(want.shape, generator=generator) * (want.detach() != 0)
    (want * weight).sum().backward()
    return ids, weight, want.detach(), [parameter.grad for parameter in model.parameters()]


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm().clamp_min(1e-30))

"""Model presets: a transformers model type and the options that differ from its defaults.

The tiny presets train on bytes in seconds on a CPU, and have enough heads for four Ulysses ranks. The others have the
published architecture of the model they are named after, with random weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from usp.data.tokenizer import BYTE_EOS, BYTE_VOCAB


@dataclass(frozen=True)
class Preset:
    model_type: str
    options: dict[str, Any] = field(hash=False)


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }


def _positions(longest: int, theta: float = 1e4) -> dict[str, Any]:
    return {"max_position_embeddings": longest, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _experts(number: int, chosen: int, intermediate: int) -> dict[str, Any]:
    """Return the expert options of Qwen3-MoE; Mixtral's experts have `intermediate_size`."""
    return {
        "num_experts": number,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": intermediate,
        "norm_topk_prob": True,
    }


_LLAMA = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}
_TINY = _sizes(128, 352, 2, 8, 4, vocab=BYTE_VOCAB) | _positions(131072) | {"pad_token_id": 0, "eos_token_id": BYTE_EOS}

PRESETS: dict[str, Preset] = {
    "tiny": Preset("llama", _TINY),
    "qwen2-tiny": Preset("qwen2", _TINY),
    "qwen3-tiny": Preset("qwen3", _TINY),
    "mistral-tiny": Preset("mistral", _TINY | {"sliding_window": 1024}),
    "mixtral-tiny": Preset(
        "mixtral", _TINY | {"num_local_experts": 8, "output_router_logits": True, "router_aux_loss_coef": 0.02}
    ),
    "qwen3-moe-tiny": Preset("qwen3_moe", _TINY | _experts(16, 4, intermediate=96) | {"output_router_logits": True}),
    "llama2-7b": Preset("llama", _sizes(4096, 11008, 32, 32, 32, vocab=32000) | _positions(4096) | _LLAMA),
    "llama2-70b": Preset("llama", _sizes(8192, 28672, 80, 64, 8, vocab=32000) | _positions(4096) | _LLAMA),
    "llama3-8b": Preset(
        "llama",
        _sizes(4096, 14336, 32, 32, 8, vocab=128256)
        | _positions(8192, theta=5e5)
        | _LLAMA
        | {"bos_token_id": 128000, "eos_token_id": 128001},
    ),
    "qwen2-7b": Preset("qwen2", _sizes(3584, 18944, 28, 28, 4, vocab=152064) | _positions(131072, theta=1e6)),
    "qwen3-8b": Preset("qwen3", _sizes(4096, 12288, 36, 32, 8, vocab=151936) | _positions(40960, theta=1e6)),
    "mistral-7b": Preset(
        "mistral",
        _sizes(4096, 14336, 32, 32, 8, vocab=32000) | _positions(32768) | _LLAMA | {"sliding_window": 4096},
    ),
    "mixtral-8x7b": Preset(
        "mixtral",
        _sizes(4096, 14336, 32, 32, 8, vocab=32000)
        | _positions(32768, theta=1e6)
        | _LLAMA
        | {"router_aux_loss_coef": 0.02},
    ),
    "qwen3-30b-a3b": Preset(
        "qwen3_moe",
        _sizes(2048, 6144, 48, 32, 4, vocab=151936)
        | _positions(40960, theta=1e6)
        | _experts(128, 8, intermediate=768)
        | {"head_dim": 128},
    ),
}

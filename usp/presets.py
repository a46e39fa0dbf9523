"""Model presets: a transformers model type and the options that differ from its defaults.

The tiny presets train on bytes in seconds on a CPU, and have enough heads for four Ulysses ranks. The others have the
published architecture of the model they are named after, with random weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from usp.data.tokenizer import BYTE_EOS, BYTE_VOCAB

PRESET_RATE, PRETRAINED_RATE, LORA_RATE = 3e-3, 1e-5, 1e-4  # peak learning rates of next-token training
LORA_FACTOR = 10  # between the rates of adapters and of all weights


@dataclass(frozen=True)
class Preset:
    model_type: str
    options: dict[str, Any] = field(hash=False)


def _preset(
    model_type: str,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    vocab: int,
    longest: int,
    theta: float = 1e4,
    **others: Any,
) -> Preset:
    options = {
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
        "max_position_embeddings": longest,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }
    return Preset(model_type, options | others)


def _tiny(model_type: str, **others: Any) -> Preset:
    others = {"pad_token_id": 0, "eos_token_id": BYTE_EOS} | others
    return _preset(model_type, 128, 352, 2, 8, 4, vocab=BYTE_VOCAB, longest=131072, **others)


def _experts(number: int, chosen: int, intermediate: int) -> dict[str, Any]:
    """Return the expert options of Qwen3-MoE; Mixtral's experts have `intermediate_size`."""
    return {
        "num_experts": number,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": intermediate,
        "norm_topk_prob": True,
    }


_LLAMA = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA3 = _LLAMA | {"bos_token_id": 128000, "eos_token_id": 128001}
_MIXTRAL = _LLAMA | {"router_aux_loss_coef": 0.02}
_QWEN3_MOE = _experts(128, 8, intermediate=768) | {"head_dim": 128}

PRESETS: dict[str, Preset] = {
    "tiny": _tiny("llama"),
    "qwen2-tiny": _tiny("qwen2"),
    "qwen3-tiny": _tiny("qwen3"),
    "mistral-tiny": _tiny("mistral", sliding_window=1024),
    "mixtral-tiny": _tiny("mixtral", num_local_experts=8, output_router_logits=True, router_aux_loss_coef=0.02),
    "qwen3-moe-tiny": _tiny("qwen3_moe", **_experts(16, 4, intermediate=96), output_router_logits=True),
    "llama2-7b": _preset("llama", 4096, 11008, 32, 32, 32, vocab=32000, longest=4096, **_LLAMA),
    "llama2-70b": _preset("llama", 8192, 28672, 80, 64, 8, vocab=32000, longest=4096, **_LLAMA),
    "llama3-8b": _preset("llama", 4096, 14336, 32, 32, 8, vocab=128256, longest=8192, theta=5e5, **_LLAMA3),
    "qwen2-7b": _preset("qwen2", 3584, 18944, 28, 28, 4, vocab=152064, longest=131072, theta=1e6),
    "qwen3-8b": _preset("qwen3", 4096, 12288, 36, 32, 8, vocab=151936, longest=40960, theta=1e6),
    "mistral-7b": _preset("mistral", 4096, 14336, 32, 32, 8, vocab=32000, longest=32768, sliding_window=4096, **_LLAMA),
    "mixtral-8x7b": _preset("mixtral", 4096, 14336, 32, 32, 8, vocab=32000, longest=32768, theta=1e6, **_MIXTRAL),
    "qwen3-30b-a3b": _preset("qwen3_moe", 2048, 6144, 48, 32, 4, vocab=151936, longest=40960, theta=1e6, **_QWEN3_MOE),
}


def settled_rate(asked: float, model: str, preset: float = PRESET_RATE, pretrained: float = PRETRAINED_RATE) -> float:
    """Return the peak learning rate `asked` for `model`; for 0 the default for a preset, or for pretrained weights."""
    return asked or (preset if model in PRESETS else pretrained)

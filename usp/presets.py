"""Model presets: a transformers model type and the options that differ from its defaults.

The tiny presets train on bytes in seconds on a CPU, and have enough heads for four Ulysses ranks. The others have the
published architecture of the model they are named after, with random weights: the figures of config.json in the
repository on huggingface.co that stands beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from usp.data.tokenizer import BYTE_EOS, BYTE_VOCAB
from usp.fields import AUTO_RATE

PRESET_RATE, PRETRAINED_RATE, LORA_RATE = 3e-3, 1e-5, 1e-4  # peak learning rates of next-token training
LORA_FACTOR = 10  # between the rates of adapters and of all weights


@dataclass(frozen=True)
class Preset:
    model_type: str
    options: dict[str, Any] = field(hash=False)


_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def _preset(model_type: str, *sizes: int, vocab: int, longest: int, theta: float = 1e4, **others: Any) -> Preset:
    options = dict(zip(_SIZES, sizes, strict=True)) | {
        "head_dim": sizes[0] // sizes[3],
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
_LLAMA31_ROPE: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 8192}
_LLAMA31_ROPE |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA31: dict[str, Any] = _LLAMA3 | {"rope_parameters": _LLAMA31_ROPE}
_QWEN25 = {"rms_norm_eps": 1e-5}
_SMALL = _LLAMA | {"head_dim": 128, "sliding_window": None}
_MIXTRAL22 = _LLAMA | {"router_aux_loss_coef": 0.001}
_YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096, "mscale": 1, "mscale_all_dim": 1}
_V3_ROPE = _YARN | {"rope_theta": 1e4, "factor": 40.0, "beta_fast": 32, "beta_slow": 1}
_K2_ROPE = _YARN | {"rope_theta": 5e4, "factor": 32.0, "beta_fast": 1, "beta_slow": 1}
_K2: dict[str, Any] = {"vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64}
_K2 |= {"n_routed_experts": 384, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_K2 |= {"routed_scaling_factor": 2.827, "max_position_embeddings": 131072, "rope_parameters": _K2_ROPE}
_K2 |= {"bos_token_id": 163584, "eos_token_id": 163585}
_AIR_ROPE = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
_A3B, _A22B = (_experts(128, 8, intermediate=size) | {"head_dim": 128} for size in (768, 1536))

PRESETS: dict[str, Preset] = {
    "tiny": _tiny("llama"),
    "qwen2-tiny": _tiny("qwen2"),
    "qwen3-tiny": _tiny("qwen3"),
    "mistral-tiny": _tiny("mistral", sliding_window=1024),
    "mixtral-tiny": _tiny("mixtral", num_local_experts=8, output_router_logits=True, router_aux_loss_coef=0.02),
    "qwen3-moe-tiny": _tiny("qwen3_moe", **_experts(16, 4, intermediate=96), output_router_logits=True),
    # meta-llama/Llama-2-7b-hf, Llama-2-70b-hf, Meta-Llama-3-8B, Meta-Llama-3-70B, Llama-3.1-405B
    "llama2-7b": _preset("llama", 4096, 11008, 32, 32, 32, vocab=32000, longest=4096, **_LLAMA),
    "llama2-70b": _preset("llama", 8192, 28672, 80, 64, 8, vocab=32000, longest=4096, **_LLAMA),
    "llama3-8b": _preset("llama", 4096, 14336, 32, 32, 8, vocab=128256, longest=8192, theta=5e5, **_LLAMA3),
    "llama3-70b": _preset("llama", 8192, 28672, 80, 64, 8, vocab=128256, longest=8192, theta=5e5, **_LLAMA3),
    "llama3-405b": _preset("llama", 16384, 53248, 126, 128, 8, vocab=128256, longest=131072, **_LLAMA31),
    # Qwen/Qwen2-7B, Qwen2.5-32B, Qwen2.5-72B
    "qwen2-7b": _preset("qwen2", 3584, 18944, 28, 28, 4, vocab=152064, longest=131072, theta=1e6),
    "qwen2.5-32b": _preset("qwen2", 5120, 27648, 64, 40, 8, vocab=152064, longest=131072, theta=1e6, **_QWEN25),
    "qwen2.5-72b": _preset("qwen2", 8192, 29568, 80, 64, 8, vocab=152064, longest=131072, theta=1e6, **_QWEN25),
    # Qwen/Qwen3-8B, Qwen3-14B, Qwen3-32B, Qwen3-30B-A3B, Qwen3-235B-A22B
    "qwen3-8b": _preset("qwen3", 4096, 12288, 36, 32, 8, vocab=151936, longest=40960, theta=1e6),
    "qwen3-14b": _preset("qwen3", 5120, 17408, 40, 40, 8, vocab=151936, longest=40960, theta=1e6),
    "qwen3-32b": _preset("qwen3", 5120, 25600, 64, 64, 8, vocab=151936, longest=40960, theta=1e6, head_dim=128),
    "qwen3-30b-a3b": _preset("qwen3_moe", 2048, 6144, 48, 32, 4, vocab=151936, longest=40960, theta=1e6, **_A3B),
    "qwen3-235b-a22b": _preset("qwen3_moe", 4096, 12288, 94, 64, 4, vocab=151936, longest=40960, theta=1e6, **_A22B),
    # mistralai/Mistral-7B-v0.1, Mistral-Small-24B-Base-2501, Mixtral-8x7B-v0.1, Mixtral-8x22B-v0.1
    "mistral-7b": _preset("mistral", 4096, 14336, 32, 32, 8, vocab=32000, longest=32768, sliding_window=4096, **_LLAMA),
    "mistral-small": _preset("mistral", 5120, 32768, 40, 32, 8, vocab=131072, longest=32768, theta=1e8, **_SMALL),
    "mixtral-8x7b": _preset("mixtral", 4096, 14336, 32, 32, 8, vocab=32000, longest=32768, theta=1e6, **_MIXTRAL),
    "mixtral-8x22b": _preset("mixtral", 6144, 16384, 56, 48, 8, vocab=32000, longest=65536, theta=1e6, **_MIXTRAL22),
    # deepseek-ai/DeepSeek-V3, moonshotai/Kimi-K2-Base, zai-org/GLM-4.5-Air, openai/gpt-oss-20b, gpt-oss-120b
    "deepseek-v3": Preset("deepseek_v3", {"max_position_embeddings": 163840, "rope_parameters": _V3_ROPE}),
    "kimi-k2": Preset("deepseek_v3", _K2),
    "glm-4.5-air": Preset("glm4_moe", {"head_dim": 128, "attention_bias": True, "rope_parameters": _AIR_ROPE}),
    "gpt-oss-20b": Preset("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss-120b": Preset("gpt_oss", {}),
}


def settled_rate(asked: float, model: str, preset: float = PRESET_RATE, pretrained: float = PRETRAINED_RATE) -> float:
    """Return the peak learning rate `asked` for `model`; for AUTO_RATE the default for a preset, or for pretrained
    weights."""
    return asked if asked != AUTO_RATE else preset if model in PRESETS else pretrained

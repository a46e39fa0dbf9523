"""A longer context: what becomes of the rotary positions, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.usp.tiny import SIZES
from usp.hf.models import with_context

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama(**rope: Any) -> LlamaConfig:
    """A model of 256 positions."""
    rope = rope or {"rope_type": "default", "rope_theta": 1e4}
    return LlamaConfig(**SIZES, head_dim=16, rope_parameters=dict(rope))


def frequencies(config: LlamaConfig) -> torch.Tensor:
    return LlamaRotaryEmbedding(config).inv_freq


def changed(config: LlamaConfig, scaling: str) -> dict[str, Any]:
    """Return the rotary parameters for 1,024 positions."""
    longer = with_context(config, 1024, scaling, pretrained=True)
    assert longer.max_position_embeddings == 1024 and config.max_position_embeddings == 256
    return longer.rope_parameters


def test_yarn_and_linear_are_those_of_transformers() -> None:
    base = {"rope_theta": 1e4, "factor": 4.0}
    assert changed(llama(), "yarn") == base | {"rope_type": "yarn", "original_max_position_embeddings": 256}
    assert changed(llama(), "linear") == base | {"rope_type": "linear"}


def test_ntk_divides_the_lowest_frequency_by_the_factor_and_keeps_the_highest() -> None:
    before, after = (frequencies(c) for c in (llama(), with_context(llama(), 1024, "ntk", pretrained=True)))
    torch.testing.assert_close(before / after, torch.tensor([1.0, *(4 ** (i / 7) for i in range(1, 7)), 4.0]))


def test_a_scaled_model_is_extended_by_the_same_scaling_or_ntk() -> None:
    assert changed(llama(**YARN), "yarn") == YARN | {"factor": 8.0}
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    assert changed(llama(**linear), "linear") == linear | {"factor": 8.0}
    extended = changed(llama(**LLAMA3), "ntk")
    assert extended == LLAMA3 | {"rope_theta": pytest.approx(1e4 * 4 ** (16 / 14))}
    with pytest.raises(ValueError, match=r"rope_scaling=yarn cannot extend the rope_type='llama3' .* rope_scaling=ntk"):
        changed(llama(**LLAMA3), "yarn")


def test_only_full_attention_is_extended_where_layers_differ() -> None:
    config = llama()
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    config.rope_parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": sliding,
    }
    full = {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
    assert changed(config, "linear") == {"full_attention": full, "sliding_attention": sliding}


def test_random_weights_take_any_context() -> None:
    longer = with_context(llama(), 1024, "none", pretrained=False)
    assert longer.max_position_embeddings == 1024 and longer.rope_parameters == llama().rope_parameters


def test_a_context_beyond_the_limit_needs_a_scaling_and_a_scaling_needs_such_a_context() -> None:
    with pytest.raises(ValueError, match=r"seq_len=1024 is beyond .*max_position_embeddings=256.* rope_scaling=yarn"):
        with_context(llama(), 1024, "none", pretrained=True)
    with pytest.raises(ValueError, match=r"rope_scaling=yarn is not used, because seq_len=256 is within"):
        with_context(llama(), 256, "yarn", pretrained=True)
    with pytest.raises(ValueError, match="rope_scaling=linear is not used, because random weights need none"):
        with_context(llama(), 1024, "linear", pretrained=False)
    config = llama()
    assert with_context(config, 256, "none", pretrained=True) is config

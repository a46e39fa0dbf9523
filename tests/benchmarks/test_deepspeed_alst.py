"""The DeepSpeed baseline computes the same training step as a single process."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from benchmarks.baselines.deepspeed_alst import build
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="the package deepspeed is not installed: pip install -e '.[deepspeed]'"
)


def config() -> PreTrainedConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 257}
    return AutoConfig.for_model("llama", **sizes, num_attention_heads=8, num_key_value_heads=4)


def tokens() -> Tensor:
    return torch.randint(257, (2, 256), generator=torch.Generator().manual_seed(0))


def on_ranks(zero: int, steps: int) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    step = build(config(), tokens(), zero=zero)
    return [step() for _ in range(steps)]


def on_one_process(steps: int) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(), attn_implementation="eager")
    optimizer, ids, history = torch.optim.AdamW(model.parameters(), lr=1e-3), tokens(), []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append((loss.item(), norm.item()))
    return history


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.slow(but=1)
def test_two_steps_match_one_process(zero: int) -> None:
    found, wanted = run_ranks(on_ranks, 2, zero, 2), on_one_process(2)
    difference = torch.tensor(found, dtype=torch.float64) / torch.tensor(wanted, dtype=torch.float64) - 1
    assert (difference.abs() <= 1e-5).all()

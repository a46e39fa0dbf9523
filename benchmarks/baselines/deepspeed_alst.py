"""DeepSpeed's Ulysses (ALST) on plain transformers, as a baseline for training steps.

The baseline follows DeepSpeed's documentation: `UlyssesSPAttentionHF.register_with_transformers`, ZeRO over all ranks,
sdpa attention, contiguous shards of the sequence with global position ids. DeepSpeed's data loader adapter only shards
batches, so benchmarks pass the shards directly.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from examples.deepspeed_ulysses import load_deepspeed

VERSION = "0.19.8"
PATCHES = {
    "gloo only": "no operator is compiled on CPU: gloo runs all collectives, as in our runs",
    "summed gradients": "ZeRO-3 also averages over sequence-parallel ranks, so the loss is scaled by their number",
}


def build(
    config: PreTrainedConfig, ids: Tensor, *, zero: int, learning_rate: float = 1e-3
) -> Callable[[], tuple[float, float]]:
    """Build a training step of `config`'s model with sequences sharded over the default group; collective.

    Args:
        ids: (B, S) the global batch; every token but the last of each row has a target.

    Returns:
        A function that runs one optimizer step and returns (loss over all ranks, gradient norm before clipping at 1).

    Raises:
        RuntimeError: the installed DeepSpeed is not `VERSION`.
        ValueError: from DeepSpeed, if the number of heads is not divisible by the number of ranks.
    """
    deepspeed = load_deepspeed(ids.device.type)
    if deepspeed.__version__ != VERSION:
        raise RuntimeError(f"expected deepspeed {VERSION}, got {deepspeed.__version__}: install deepspeed=={VERSION}")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ["LOCAL_RANK"] = str(ids.device.index if ids.device.type == "cuda" else rank)
    deepspeed.init_distributed(dist.get_backend())
    ulysses = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").UlyssesSPAttentionHF
    with ids.device:
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    rows, seq_len = ids.shape
    mpu = ulysses.register_with_transformers(
        model, "sdpa", ranks, rows, seq_length=seq_len, seq_length_is_variable=False
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=learning_rate),
        mpu=mpu,
        config={
            "train_micro_batch_size_per_gpu": rows,
            "sequence_parallel_size": ranks,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": zero, "reduce_bucket_size": sum(p.numel() for p in model.parameters())},
        },
    )
    own = slice(rank * seq_len // ranks, (rank + 1) * seq_len // ranks)
    targets = torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], -100)), dim=1)[:, own]
    positions = torch.arange(seq_len, device=ids.device).expand(rows, -1)[:, own]

    def step() -> tuple[float, float]:
        logits = engine(input_ids=ids[:, own], position_ids=positions, use_cache=False).logits
        share = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        share = share / (rows * (seq_len - 1))
        # ZeRO 1 and 2 average over data-parallel and sum over sequence-parallel ranks; ZeRO-3 averages over all.
        engine.backward(share * ranks if zero == 3 else share)
        engine.step()
        total = share.detach()
        dist.all_reduce(total)
        return total.item(), float(engine.get_global_grad_norm())

    return step

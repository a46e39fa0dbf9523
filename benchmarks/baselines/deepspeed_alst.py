"""DeepSpeed's Ulysses (ALST) on plain transformers, as a baseline for training steps.

The baseline follows DeepSpeed's documentation: `UlyssesSPAttentionHF.register_with_transformers`, ZeRO over all ranks,
sdpa attention, contiguous shards of the sequence with global position ids. DeepSpeed's data loader adapter only shards
batches, so benchmarks pass the shards directly.

    python -m benchmarks.baselines.deepspeed_alst      # loss and gradient norm against one process, on 4 ranks
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from tests.harness.ranks import RankPool
from usp.train.engines.deepspeed import load_deepspeed

VERSION = "0.19.8"
PATCHES = {
    "gloo only": "no operator is compiled on CPU: gloo runs all collectives, as in our runs",
    "summed gradients": "ZeRO-3 also averages over sequence-parallel ranks, so the loss is scaled by their number",
}


def build(
    config: PreTrainedConfig, ids: Tensor, *, zero: int, checkpointing: bool = False, learning_rate: float = 1e-3
) -> Callable[[], tuple[float, float]]:
    """Build a training step of `config`'s model with sequences sharded over the default group; collective.

    Args:
        ids: (B, S) the global batch; every token but the last of each row has a target.
        checkpointing: recompute each layer in the backward pass.

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
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
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


# Validation of the baseline


def _config() -> PreTrainedConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 257}
    return AutoConfig.for_model("llama", **sizes, num_attention_heads=8, num_key_value_heads=4)


def _ids() -> Tensor:
    return torch.randint(257, (2, 256), generator=torch.Generator().manual_seed(0))


def on_ranks(zero: int, steps: int) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    step = build(_config(), _ids(), zero=zero)
    return [step() for _ in range(steps)]


def on_one_process(steps: int) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_config(), attn_implementation="eager")
    optimizer, ids, history = torch.optim.AdamW(model.parameters(), lr=1e-3), _ids(), []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append((loss.item(), norm.item()))
    return history


def main() -> None:
    table = Table("ZeRO", "loss", "gradient norm", title="Largest relative difference from one process over 3 steps")
    with RankPool() as ranks:
        (wanted,) = ranks.run(on_one_process, 1, 3)
    for zero in (1, 2, 3):
        with RankPool() as ranks:  # DeepSpeed never destroys its process groups
            found = torch.tensor(ranks.run(on_ranks, 4, zero, 3, timeout=180), dtype=torch.float64)
        worst = (found / torch.tensor(wanted, dtype=torch.float64) - 1).abs().amax(dim=(0, 1)).tolist()
        table.add_row(str(zero), *(f"{value:.1e}" for value in worst))
    console = Console()
    console.print(table)
    for name, reason in PATCHES.items():
        console.print(f"[bold]{name}[/]: {reason}")


if __name__ == "__main__":
    main()

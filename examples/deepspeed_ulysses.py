"""Train a transformers model with DeepSpeed ZeRO, with each sequence sharded over the ranks.

    torchrun --nproc-per-node 4 examples/deepspeed_ulysses.py --ulysses 2 --ring 2 --zero 3

Three changes to a regular DeepSpeed script: `apply_unified_sp` on the model, `shard_batch` on each batch, and a loss
normalized by the number of targets on all ranks. DeepSpeed sees only data parallelism.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from usp import apply_unified_sp, shard_batch
from usp.losses import causal_lm_loss, global_token_count
from usp.parallel import ParallelDims, ParallelMesh
from usp.run.launch import leave

VOCAB = 512


def batches(mesh: ParallelMesh, rows: int, seq_len: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield rows that count modulo the vocabulary from a random start, equal on all sequence-parallel ranks."""
    generator = torch.Generator().manual_seed(mesh.rank("batch"))
    while True:
        start = torch.randint(VOCAB, (rows, 1), generator=generator)
        ids = (start + torch.arange(seq_len)) % VOCAB
        yield {"input_ids": ids, "labels": ids}


def load_deepspeed(device_type: str) -> Any:
    """Import deepspeed for "cuda" or "cpu"; on a CPU, where it would compile collectives of its own, it uses gloo."""
    import deepspeed

    if device_type == "cpu":
        from deepspeed.accelerator import set_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        class GlooAccelerator(CPU_Accelerator):
            """A CPU accelerator without operators that need compiling."""

            def create_op_builder(self, op_name: str) -> None:
                return None

        set_accelerator(GlooAccelerator())
    return deepspeed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ulysses", type=int, default=2, help="Ulysses degree")
    parser.add_argument("--ring", type=int, default=2, help="ring degree")
    parser.add_argument("--zero", type=int, default=3, help="ZeRO stage")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    deepspeed = load_deepspeed(device.type)
    deepspeed.init_distributed("nccl" if cuda else "gloo")
    mesh = ParallelMesh.create(ParallelDims(ulysses=args.ulysses, ring=args.ring), device.type)

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": VOCAB}
    config = AutoConfig.for_model("qwen3", **sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    model = apply_unified_sp(AutoModelForCausalLM.from_config(config), mesh, layout="zigzag")
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": cuda},
            "zero_optimization": {"stage": args.zero, "reduce_bucket_size": 10_000_000},
        },
    )
    for step, batch in zip(range(1, args.steps + 1), batches(mesh, 1, args.seq_len), strict=False):
        local = {key: value.to(engine.device) for key, value in shard_batch(batch, mesh, layout="zigzag").items()}
        targets = local.pop("shift_labels")
        # Each rank has its share of the loss, so gradients must be summed. DeepSpeed averages them: scale the loss.
        loss = causal_lm_loss(engine(**local).logits, targets, global_token_count(targets, mesh))
        engine.backward(loss * dist.get_world_size())
        engine.step()
        total = loss.detach()
        dist.all_reduce(total, group=mesh.group("loss"))
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()  # exits without interpreter teardown, which may abort with gloo

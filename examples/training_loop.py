"""A custom training loop in plain PyTorch: any transformers model, a mesh, and FSDP2.

    torchrun --nproc-per-node 4 examples/training_loop.py --ulysses 2 --ring 2

The structure follows torchtitan: mesh, model, parallelism, optimizer, steps. Replace `batches` with your data.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from usp import apply_unified_sp, shard_batch
from usp.losses import causal_lm_loss, global_token_count
from usp.parallel import ParallelDims, ParallelMesh, apply_fsdp, clip_grad_norm
from usp.run.launch import leave

VOCAB = 512


def batches(mesh: ParallelMesh, rows: int, seq_len: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield rows that count modulo the vocabulary from a random start, equal on all sequence-parallel ranks."""
    generator = torch.Generator().manual_seed(mesh.rank("batch"))
    while True:
        start = torch.randint(VOCAB, (rows, 1), generator=generator)
        ids = (start + torch.arange(seq_len)) % VOCAB
        yield {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ulysses", type=int, default=2, help="Ulysses degree")
    parser.add_argument("--ring", type=int, default=2, help="ring degree")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if cuda else torch.device("cpu")
    mesh = ParallelMesh.create(ParallelDims(ulysses=args.ulysses, ring=args.ring), device.type)

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": VOCAB}
    config = AutoConfig.for_model("qwen3", **sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    model = AutoModelForCausalLM.from_config(config).to(device)
    apply_unified_sp(model, mesh, layout="zigzag")
    apply_fsdp(model, mesh, model.model.layers, param_dtype=torch.bfloat16 if cuda else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step, batch in zip(range(1, args.steps + 1), batches(mesh, 1, args.seq_len), strict=False):
        local = {key: value.to(device) for key, value in shard_batch(batch, mesh, layout="zigzag").items()}
        targets = local.pop("shift_labels")
        # This rank's share of the mean over all ranks' targets: losses and gradients are summed, not averaged.
        loss = causal_lm_loss(model(**local).logits, targets, global_token_count(targets, mesh))
        loss.backward()
        norm = clip_grad_norm(model.parameters(), 1.0, mesh)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total, group=mesh.group("loss"))
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total.item():.4f}, gradient norm {norm:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()  # exits without interpreter teardown, which may abort with gloo

"""A small diffusion transformer with joint attention, trained by flow matching: image tokens are sharded, text is not.

    torchrun --nproc-per-node 8 examples/joint_dit.py --ulysses 2 --ring 4

Blocks are those of Stable Diffusion 3 (MMDiT, Esser et al. 2024, arXiv 2403.03206): text and image have their own
weights and attend to each other. Every rank computes the whole text stream; its gradients, like all others, are shares
that FSDP sums. Losses and weights are those of one process, for images of any size. Replace `batches` with your data.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.functional import silu

from usp import JointAttention, Mask, UnifiedSPAttention, shard_sequence
from usp.parallel import ParallelDims, ParallelMesh, apply_fsdp, clip_grad_norm
from usp.run.launch import leave

WORDS, TEXT_LEN, CHANNELS, DIM, HEADS = 8, 5, 4, 96, 6


class Stream(nn.Module):
    """What a block has for one of image and text; of a text whose result nobody needs, only keys and values."""

    def __init__(self, keys_only: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM, elementwise_affine=False)
        self.modulation = nn.Linear(DIM, (2 if keys_only else 6) * DIM)
        self.heads = nn.Linear(DIM, (2 if keys_only else 3) * DIM)
        if not keys_only:
            self.out = nn.Linear(DIM, DIM)
            self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def before(self, x: Tensor, condition: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return k, v and q (batch, tokens, heads, head dim), and the modulation of what follows."""
        shift, scale, *rest = (
            self.modulation(silu(condition)).unsqueeze(1).chunk(self.modulation.out_features // DIM, -1)
        )
        parts = self.heads(self.norm(x) * (1 + scale) + shift).split(DIM, -1)
        return [part.unflatten(-1, (HEADS, -1)) for part in parts], rest

    def after(self, x: Tensor, attended: Tensor, modulation: list[Tensor]) -> Tensor:
        gate, shift, scale, mlp_gate = modulation
        x = x + gate * self.out(attended.flatten(2))
        return x + mlp_gate * self.mlp(self.norm(x) * (1 + scale) + shift)


class Block(nn.Module):
    def __init__(self, attention: JointAttention, last: bool) -> None:
        super().__init__()
        self.attention, self.image, self.text = attention, Stream(), Stream(keys_only=last)

    def forward(self, image: Tensor, text: Tensor, condition: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        (k, v, q), modulation = self.image.before(image, condition)
        (text_k, text_v, *text_q), text_modulation = self.text.before(text, condition)
        joint_q = text_q[0] if text_q else None
        results = self.attention(q, k, v, joint_q, text_k, text_v, Mask(causal=False, cu_seqlens=cu_seqlens))
        if not text_q:
            return self.image.after(image, results, modulation), text
        attended, text_attended = results
        return self.image.after(image, attended, modulation), self.text.after(text, text_attended, text_modulation)


class DiT(nn.Module):
    """Predicts the velocity of noisy image tokens at `time`, given the tokens' features of position and a text."""

    def __init__(self, mesh: ParallelMesh, blocks: int) -> None:
        super().__init__()
        attention = JointAttention(UnifiedSPAttention(mesh, layout="contiguous"))
        self.image_in, self.words = nn.Linear(CHANNELS, DIM), nn.Embedding(WORDS, DIM)
        self.time_in = nn.Sequential(nn.Linear(DIM, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.blocks = nn.ModuleList(Block(attention, last=number == blocks - 1) for number in range(blocks))
        self.norm, self.image_out = nn.LayerNorm(DIM, elementwise_affine=False), nn.Linear(DIM, CHANNELS)

    def forward(self, image: Tensor, places: Tensor, text: Tensor, time: Tensor, cu_seqlens: Tensor) -> Tensor:
        condition = self.time_in(waves(1000 * time, DIM))
        image, text = self.image_in(image) + places, self.words(text)
        for block in self.blocks:
            image, text = block(image, text, condition, cu_seqlens)
        return self.image_out(self.norm(image))


def waves(x: Tensor, features: int) -> Tensor:
    """Return sines and cosines of x at `features` / 2 frequencies."""
    angles = x.unsqueeze(-1) * torch.exp2(-torch.arange(features // 2, device=x.device) * 26 / features)
    return torch.cat((angles.sin(), angles.cos()), -1)


def batches(mesh: ParallelMesh, rows: int, side: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images (rows, side * side, CHANNELS) of stripes, whose widths a text (rows, TEXT_LEN) names."""
    generator = torch.Generator().manual_seed(mesh.rank("batch"))
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    while True:
        text = torch.randint(WORDS, (rows, TEXT_LEN), generator=generator)
        angles = (text[:, :CHANNELS, None] + 1) * (x + 2 * y).flatten() / 6
        yield angles.sin().transpose(1, 2), text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ulysses", type=int, default=2, help="Ulysses degree")
    parser.add_argument("--ring", type=int, default=4, help="ring degree")
    parser.add_argument("--side", type=int, default=45, help="tokens per side of an image")
    parser.add_argument("--blocks", type=int, default=2, help="transformer blocks")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--save", help="file for the trained weights")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if cuda else torch.device("cpu")
    mesh = ParallelMesh.create(ParallelDims(ulysses=args.ulysses, ring=args.ring), device.type)
    torch.manual_seed(0)
    model = DiT(mesh, args.blocks).to(device)
    apply_fsdp(model, mesh, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    tokens, rows = args.side**2, 2
    cu_seqlens = torch.tensor([0, tokens])  # the ranks need not divide the tokens: what fills up is hidden
    y, x = torch.meshgrid(torch.arange(args.side), torch.arange(args.side), indexing="ij")
    features = torch.cat((waves(x.flatten(), DIM // 2), waves(y.flatten(), DIM // 2)), -1).expand(rows, -1, -1)
    generator = torch.Generator().manual_seed(1 + mesh.rank("batch"))
    for step, (image, text) in zip(range(1, args.steps + 1), batches(mesh, rows, args.side), strict=False):
        noise, time = torch.randn(image.shape, generator=generator), torch.rand(rows, generator=generator)
        mixed = torch.lerp(image, noise, time[:, None, None])
        whole = (mixed, features, noise - image, torch.ones_like(image))
        noisy, places, velocity, real = (
            shard_sequence(part, mesh, "contiguous", cu_seqlens=cu_seqlens).to(device) for part in whole
        )
        predicted = model(noisy, places, text.to(device), time.to(device), cu_seqlens)
        # This rank's share of the mean over all elements: losses and gradients are summed, not averaged.
        loss = ((predicted - velocity).square() * real).sum() / (image.numel() * mesh.size("batch"))
        loss.backward()
        norm = clip_grad_norm(model.parameters(), 1.0, mesh)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total, group=mesh.group("loss"))
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total.item():.6f}, gradient norm {norm:.4f}", flush=True)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if args.save and dist.get_rank() == 0:
        torch.save(weights, args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()  # exits without interpreter teardown, which may abort with gloo

"""Random calls on random grids, against dense fp64 attention: results, log-sum-exps, all gradients, and bytes sent.

A call is a `Draw` of fields. A feature joins the search by a function in FIELDS, which draws its value from the fields
before it, and by what it means for `arguments` and, for a mask, `visible`. A wrong draw is printed as one line, and

    python -m tests.attention.test_search RANKS SEED [DRAWS]

checks it again, or so many draws from it on. The tests beside this one check draws that they make by hand (`made`).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.ranks import RankPool, on_first_rank
from usp import UnifiedSPAttention, shard_sequence
from usp.attention import (
    LAYOUTS,
    AttentionSpec,
    HeadPlan,
    KeepResults,
    SequenceLayout,
    accumulate,
    layout_name,
    ring,
    sparse,
)
from usp.parallel import ParallelDims, ParallelMesh
from usp.parallel.wire import SentBytes

from . import dense
from .calls import called, plan_of

TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}
MASKS: dict[str, Callable[..., Tensor]] = {
    "bands": lambda b, h, q, k: (q - k < 9) & (q >= k),
    "tiles": lambda b, h, q, k: (q // 5 + k // 7) % 2 == 0,
    "rows": lambda b, h, q, k: (k - 20 * b <= q) & ((q + k) % 8 < 7),
    "heads": lambda b, h, q, k: (q - k <= 4 * h) & (q >= k - h),
}
Rows = tuple[tuple[int, ...], ...]
COMMAND = "python -m tests.attention.test_search"
FIELDS: dict[str, Callable[[random.Random, Draw], Any]] = {}


class Draw(dict[str, Any]):
    """A random call on some number of ranks, by the names of FIELDS; the same for the same seed."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]

    @staticmethod
    def of(seed: int, ranks: int) -> Draw:
        drawn = Draw(seed=seed, ranks=ranks)
        for name, draw in FIELDS.items():
            drawn[name] = draw(random.Random(f"{seed} {ranks} {name}"), drawn)
        return drawn

    def __str__(self) -> str:
        fields = ", ".join(f"{name}={x!r}" for name, x in self.items() if name not in ("seed", "ranks"))
        return fields if "tolerance" in self else f"{COMMAND} {self.ranks} {self.seed}  # {fields}"

    @property
    def of_itself(self) -> bool:
        """Whether a sequence attends to itself alone."""
        return self.keys_of == "itself" and not self.joint

    @property
    def key_tokens(self) -> int:
        """Tokens of the sharded keys."""
        return {"itself": self.tokens, "none": 0}.get(self.keys_of, self.other_tokens)


def field(draw: Callable[[random.Random, Draw], Any]) -> Callable[[random.Random, Draw], Any]:
    FIELDS[draw.__name__] = draw
    return draw


@field
def grid(of: random.Random, d: Draw) -> tuple[int, int]:
    """Return ring and ulysses; what they leave of the ranks is dp_shard."""
    sizes = [d.ranks] * 5 + [size for size in range(1, d.ranks) if d.ranks % size == 0]
    size = of.choice(sizes)
    ring = of.choice([ring for ring in range(1, size + 1) if size % ring == 0])
    return ring, size // ring


@field
def sp_order(of: random.Random, d: Draw) -> str:
    return of.choice(("ring-outer", "ulysses-outer"))


@field
def layout(of: random.Random, d: Draw) -> str:
    return layout_name(of.choice(LAYOUTS), of.choices((0, 5, 20), k=2))


@field
def batch(of: random.Random, d: Draw) -> int:
    return of.choice((1, 1, 1, 2, 2, 2, 3, 3, 3, 0))


@field
def heads(of: random.Random, d: Draw) -> tuple[int, int]:
    kv_heads = of.choice((1, 1, 2, 3, 3, 4))
    return kv_heads * of.randint(1, 6), kv_heads


@field
def head_dims(of: random.Random, d: Draw) -> tuple[int, int]:
    return of.choice(((8, 8), (8, 8), (8, 16), (16, 8), (24, 16)))


@field
def dtype(of: random.Random, d: Draw) -> torch.dtype:
    return of.choice((torch.float64, torch.float64, torch.float32, torch.bfloat16))


@field
def keys_of(of: random.Random, d: Draw) -> str:
    """Return of which sequence the sharded keys are."""
    return of.choice(("itself",) * 6 + ("another", "none"))


@field
def packed(of: random.Random, d: Draw) -> bool:
    """Return whether rows are packed documents."""
    return of.random() < 0.6


@field
def tokens(of: random.Random, d: Draw) -> int:
    return _length(of, d)


@field
def other_tokens(of: random.Random, d: Draw) -> int:
    """Return the tokens of another sequence."""
    return _length(of, d)


@field
def joint(of: random.Random, d: Draw) -> int:
    return of.randint(1, 30) if d.keys_of == "none" or of.random() < 0.25 else 0


@field
def joint_queries(of: random.Random, d: Draw) -> bool:
    return bool(d.joint) and d.keys_of != "none" and of.random() < 0.6


@field
def joint_strategy(of: random.Random, d: Draw) -> str:
    return of.choice(("front", "rear"))


@field
def joint_every(of: random.Random, d: Draw) -> int:
    possible = d.joint and d.keys_of == "itself" and not d.joint_queries
    return of.randint(1, 6) if possible and of.random() < 0.7 else 0


@field
def indices(of: random.Random, d: Draw) -> tuple[str, int, int]:
    """Return of what there are indices, how many for each query, and of how many consecutive keys."""
    if not d.of_itself or of.random() < 0.6:
        return "", 0, 1
    return of.choice(("tokens", "KV heads", "KV heads")), of.randint(1, 9), of.choice((1, 1, 2, 5))


@field
def return_weights(of: random.Random, d: Draw) -> bool:
    return d.indices[0] == "tokens" and of.random() < 0.5


@field
def causal(of: random.Random, d: Draw) -> bool:
    return d.keys_of != "another" and (d.joint_every > 0 or of.random() < 0.6)


@field
def window(of: random.Random, d: Draw) -> tuple[int, int] | None:
    possible = d.keys_of != "another" and of.random() < 0.4
    return (of.randint(-1, 40), of.randint(-1, 40)) if possible else None


@field
def documents(of: random.Random, d: Draw) -> tuple[Rows | None, Rows | None, Rows | None]:
    """Return the boundaries of queries, keys of another sequence and joint tokens, of all rows or of each."""
    if not d.packed:
        return None, None, None
    count, rows = of.randint(1, 5), of.choice((1, max(1, d.batch)))

    def cuts(tokens: int) -> Rows:
        """Return cuts of tokens, of which a row may be all padding."""
        most = [tokens if of.random() < 0.95 else 0 for _ in range(rows)]
        return tuple((0, *sorted(of.choices(range(tokens + 1), k=count))) for tokens in most)

    other, shared = d.keys_of == "another", d.joint > 0
    return cuts(d.tokens), cuts(d.other_tokens) if other else None, cuts(d.joint) if shared else None


@field
def chunk(of: random.Random, d: Draw) -> int | None:
    return of.randint(1, 30) if d.of_itself and of.random() < 0.15 else None


@field
def prefix_tree(of: random.Random, d: Draw) -> Rows | None:
    possible = d.of_itself and d.causal and d.packed and not d.indices[0] and d.chunk is None
    if not possible or of.random() < 0.6:
        return None
    return tuple(tuple(of.randint(-1, at - 1) for at in range(len(row) - 1)) for row in d.documents[0])


@field
def prefix(of: random.Random, d: Draw) -> Rows | None:
    possible = d.of_itself and d.causal and not d.indices[0] and d.chunk is None
    if not possible or of.random() < 0.6:
        return None
    return tuple(tuple(of.randint(0, b - a) for a, b in pairwise(row)) for row in d.documents[0] or ((0, d.tokens),))


@field
def mask_mod(of: random.Random, d: Draw) -> str | None:
    possible = d.of_itself and not d.indices[0] and d.prefix is d.prefix_tree is None
    return of.choice([*MASKS]) if possible and of.random() < 0.3 else None


@field
def sinks(of: random.Random, d: Draw) -> bool:
    return d.indices[0] != "KV heads" and of.random() < 0.3


@field
def softcap(of: random.Random, d: Draw) -> float | None:
    return 1.5 if of.random() < 0.2 else None


@field
def scale(of: random.Random, d: Draw) -> float | None:
    return 0.7 if of.random() < 0.2 else None


@field
def return_lse(of: random.Random, d: Draw) -> bool:
    return not d.indices[0] and of.random() < 0.4


@field
def kernel(of: random.Random, d: Draw) -> str:
    return "auto" if d.indices[0] or of.random() < 0.7 else "reference"


@field
def head_groups(of: random.Random, d: Draw) -> int | None:
    most = max(map((plan := HeadPlan(*d.heads, d.grid[1])).kv_width, range(plan.ulysses)))
    plain = d.of_itself and not d.indices[0] and not d.return_lse and d.mask_mod != "heads"
    return of.choice((None, 1, most if plain and d.grid[1] > 1 else 1))


@field
def replayed(of: random.Random, d: Draw) -> bool:
    """Return whether the results are those of a replay, as under activation checkpointing."""
    return of.random() < 0.2


@field
def heads_first(of: random.Random, d: Draw) -> bool:
    """Return whether q, k and v are transposed in memory."""
    return of.random() < 0.3


def _length(of: random.Random, d: Draw) -> int:
    tokens, multiple = of.randint(1, 70), SequenceLayout.multiple_of(d.layout, *d.grid)
    return tokens if d.packed else -(-tokens // multiple) * multiple


PLAIN = {
    "seed": 3, "sp_order": "ring-outer", "layout": "zigzag", "batch": 2, "heads": (6, 3), "head_dims": (16, 16),
    "dtype": torch.float32, "keys_of": "itself", "packed": False, "other_tokens": 0, "joint": 0, "joint_queries": False,
    "joint_strategy": "front", "joint_every": 0, "indices": ("", 0, 1), "return_weights": False, "causal": False,
    "window": None, "documents": (None, None, None), "chunk": None, "prefix_tree": None, "prefix": None,
    "mask_mod": None, "sinks": False, "softcap": None, "scale": None, "return_lse": False, "kernel": "auto",
    "head_groups": 1, "replayed": False, "heads_first": False, "tolerance": 1e-6,
}  # fmt: skip


def made(**fields: Any) -> Draw:
    """Return a call of these fields, by default the plainest ones, whose errors are relative to a tensor's own size."""
    return Draw(PLAIN | fields)


def on_grid(draw: Draw, ulysses: int, ring: int) -> Draw:
    return Draw(draw | {"grid": (ring, ulysses), "ranks": ring * ulysses})


# What a call means


def numbers(tokens: int, rows: int, boundaries: Rows | None) -> tuple[Tensor, Tensor]:
    """Return for each token (rows, tokens) the number of its document, -1 for none, and its place in it."""
    number, place = torch.full((rows, tokens), -1), torch.zeros(rows, tokens, dtype=torch.int64)
    for row in range(rows):
        cuts = (0, tokens) if boundaries is None else boundaries[row % len(boundaries)]
        for document, (start, stop) in enumerate(pairwise(cuts)):
            number[row, start:stop], place[row, start:stop] = document, torch.arange(stop - start)
    return number, place


def chosen(d: Draw, indices: Tensor) -> Tensor:
    """Return the pairs (B, heads or 1, queries, keys) that indices (B, S, k) or (B, S, K, k) name."""
    block = torch.arange(d.indices[2])
    at = (indices.unsqueeze(-1) + block).where(indices.unsqueeze(-1) >= 0, -1).flatten(-2)
    at = at.unsqueeze(2) if indices.dim() == 3 else at.repeat_interleave(d.heads[0] // d.heads[1], 2)
    return (at.unsqueeze(-1) == torch.arange(d.tokens)).any(3).transpose(1, 2)


def visible(d: Draw, whole: dict[str, Tensor]) -> Tensor:
    """Return the mask (B, heads or 1, [sharded; joint] queries, [sharded; joint] keys)."""
    arguments = mask_arguments(d)
    number, place = numbers(d.tokens, d.batch, d.documents[0])
    seen = torch.zeros(d.batch, 1, d.tokens, 0, dtype=torch.bool)
    if d.keys_of == "another":
        seen = _alike(number, numbers(d.other_tokens, d.batch, d.documents[1])[0]).unsqueeze(1)
    elif d.keys_of == "itself":
        names = ("causal", "window", "cu_seqlens", "prefix", "prefix_tree")
        known = {name: arguments[name] for name in names if name in arguments}
        seen = dense.visible(d.batch, d.tokens, **known).unsqueeze(1)
    if d.chunk is not None:
        seen = seen & _alike(place // d.chunk, place // d.chunk).unsqueeze(1)
    if d.mask_mod is not None:
        b, h, at = (
            torch.arange(d.batch).view(-1, 1, 1, 1),
            torch.arange(d.heads[0]).view(-1, 1, 1),
            torch.arange(d.tokens),
        )
        seen = seen & MASKS[d.mask_mod](b, h, at.view(-1, 1), at)
    if "indices" in whole:
        seen = seen & chosen(d, whole["indices"])
    if not d.joint:
        return seen
    joint_number, joint_place = numbers(d.joint, d.batch, d.documents[2])
    shown = _alike(number, joint_number)
    if d.joint_every:
        shown &= place.unsqueeze(2) >= (joint_place.unsqueeze(1) + 1) * d.joint_every - 1
    elif d.causal and d.joint_strategy == "rear":
        shown &= False
    seen = torch.cat((seen, shown.unsqueeze(1)), 3)
    if not d.joint_queries:
        return seen
    keys = number if d.keys_of == "itself" else numbers(d.other_tokens, d.batch, d.documents[1])[0]
    back, among = _alike(joint_number, keys), _alike(joint_number, joint_number)
    if d.causal:
        back &= d.joint_strategy == "rear"
        among &= torch.ones(d.joint, d.joint, dtype=torch.bool).tril()
    return torch.cat((seen, torch.cat((back, among), 2).unsqueeze(1)), 2)


def _alike(queries: Tensor, keys: Tensor) -> Tensor:
    return (queries.unsqueeze(2) == keys.unsqueeze(1)) & (queries >= 0).unsqueeze(2)


def tensors_of(d: Draw) -> dict[str, Tensor]:
    """Return the global tensors of a call, and the gradients of its results."""
    generator, (n, kv), (size, v_size) = torch.Generator().manual_seed(d.seed), d.heads, d.head_dims
    keys, shared = d.key_tokens, d.joint if d.joint_queries else 0
    shapes = {
        "q": (d.tokens, n, size), "k": (keys, kv, size), "v": (keys, kv, v_size), "joint_q": (shared, n, size),
        "joint_k": (d.joint, kv, size), "joint_v": (d.joint, kv, v_size), "dout": (d.tokens + shared, n, v_size),
        "dlse": (d.tokens + shared, n),
    }  # fmt: skip
    whole = {
        name: torch.randn(d.batch, *shape, generator=generator, dtype=torch.float64).to(d.dtype)
        for name, shape in shapes.items()
        if shape[0]
    }
    if d.sinks:
        whole["sinks"] = torch.randn(n, generator=generator, dtype=torch.float64).to(d.dtype)
    if d.indices[0]:
        of, count, block = d.indices
        shape = (d.batch, d.tokens, *((kv,) if of == "KV heads" else ()), count)
        indices = torch.randint(-1, d.tokens, shape, generator=generator)
        indices.transpose(1, -1)[:, 0, ..., ::2] = torch.arange(0, d.tokens, 2)  # half of the queries choose themselves
        indices[:, 5:6] = -1  # and one chooses none
        if d.return_weights:  # blocks that are equal or apart, so that a key is of one of them
            indices = indices.div(block, rounding_mode="floor") * block
        whole["indices"] = indices.to((torch.int64, torch.int32)[d.seed % 2])
    return whole


def expected(d: Draw) -> dict[str, Tensor]:
    """Return the results and gradients of a call in fp64, by name."""
    whole = tensors_of(d)
    leaves = {name: x.double().requires_grad_() for name, x in whole.items() if name not in ("dout", "dlse", "indices")}
    q, k, v = (torch.cat([leaves[n] for n in (side, f"joint_{side}") if n in leaves], 1) for side in ("q", "k", "v"))
    k, v = (x.repeat_interleave(d.heads[0] // d.heads[1], dim=2) for x in (k, v))
    scores = torch.einsum("bqnh,bknh->bnqk", q, k) * (d.scale or d.head_dims[0] ** -0.5)
    if d.softcap is not None:
        scores = d.softcap * torch.tanh(scores / d.softcap)
    seen = visible(d, whole)
    parts = [scores.masked_fill(~seen, float("-inf"))]
    if d.sinks:
        parts.append(leaves["sinks"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1))
    every = torch.cat(parts, -1)
    top = every.amax(-1, keepdim=True).detach()
    weights = torch.exp(every - top.masked_fill(top.isneginf(), 0.0))
    total = weights.sum(-1, keepdim=True)
    lse = (total.where(total > 0, 1.0).log() + top).squeeze(-1).transpose(1, 2)
    weights = (weights / total.where(total > 0, 1.0))[..., : v.shape[1]]
    out = torch.einsum("bnqk,bknv->bqnv", weights, v)
    loss = (out * whole["dout"].double()).sum()
    if d.return_lse:
        shown = lse.isfinite()
        loss = loss + (lse * whole["dlse"].double())[shown].sum()
    loss.backward()
    found = {f"d{name}": x.grad for name, x in leaves.items()}
    results = {"out": out.detach()} | ({"lse": lse.detach()} if d.return_lse else {})
    for name, x in results.items():
        found[name] = x[:, : d.tokens]
        if d.joint_queries:
            found[f"joint_{name}"] = x[:, d.tokens :]
    if d.return_weights:
        of_keys, missing = weights.detach().sum(1), -d.tokens % d.indices[2]
        found["weights"] = torch.nn.functional.pad(of_keys, (0, missing)).unflatten(2, (-1, d.indices[2])).sum(3)
    return found


# The call itself


def mask_arguments(d: Draw) -> dict[str, Any]:
    names = ("cu_seqlens", "cu_seqlens_k", "joint_cu_seqlens", "prefix", "prefix_tree")
    rows = zip(names, (*d.documents, d.prefix, d.prefix_tree), strict=True)
    kind = (torch.int64, torch.int32)[d.seed % 2]
    tensors = {name: torch.tensor(x[0] if len(x) == 1 else x, dtype=kind) for name, x in rows if x is not None}
    given = tensors | {"causal": d.causal, "window": d.window, "chunk": d.chunk}
    given |= {"joint_strategy": d.joint_strategy, "joint_every": d.joint_every}
    return given | ({} if d.mask_mod is None else {"mask_mod": MASKS[d.mask_mod], "causal": d.causal})


def sharded(d: Draw, mesh: ParallelMesh, name: str, x: Tensor) -> Tensor:
    """Return this rank's part of a tensor of the sequence; all of a joint one, or of sinks."""
    if "joint" in name or "sinks" in name:
        return x
    rows = d.documents[1 if d.keys_of == "another" and name in ("k", "v", "dk", "dv") else 0]
    cuts = torch.tensor(((0, x.shape[1]),) if rows is None else rows)
    return shard_sequence(x, mesh, d.layout, cu_seqlens=cuts)


def mesh_of(d: Draw, meshes: dict[Any, ParallelMesh]) -> ParallelMesh:
    """Return a mesh of the call's degrees, which is made once."""
    key = (d.grid, d.sp_order)
    if key not in meshes:
        (of_ring, ulysses), order = key
        dims = ParallelDims(ring=of_ring, ulysses=ulysses, dp_shard=d.ranks // of_ring // ulysses, sp_order=order)
        meshes[key] = ParallelMesh.create(dims)
    return meshes[key]


def check(d: Draw, meshes: dict[Any, ParallelMesh]) -> list[str]:
    """Return what is wrong with a call: results, gradients and bytes by name. Collective."""
    exact, whole, mesh = on_first_rank(expected, d), tensors_of(d), mesh_of(d, meshes)
    grads = {name: whole.pop(name) for name in ("dout", "dlse")}
    leaves = {name: sharded(d, mesh, name, x).clone() for name, x in whole.items()}
    if d.heads_first:
        turned = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in leaves.items() if x.dim() == 4}
        leaves |= {name: x for name, x in turned.items() if name != "indices"}
    leaves = {name: x.requires_grad_() if x.is_floating_point() else x for name, x in leaves.items()}
    module = UnifiedSPAttention(mesh, d.layout, d.kernel, d.head_groups)
    joint = tuple(leaves.get(f"joint_{name}") for name in "qkv")
    options = {"softcap": d.softcap, "scale": d.scale, "sinks": leaves.get("sinks")}
    sparse = {"indices": leaves.get("indices"), "index_block": d.indices[2], "return_weights": d.return_weights}
    sparse, options = (sparse, options) if d.indices[0] else ({}, options | {"return_lse": d.return_lse})
    tensors = leaves["q"], leaves.get("k"), leaves.get("v")
    call = partial(called, module, *tensors, joint=joint, sparse=sparse, options=options, **mask_arguments(d))
    call()  # which compares the plan over the ranks
    with torch.no_grad():
        first = call()
    keep = KeepResults()
    with SentBytes() as sent, module.keeping(keep) if d.replayed else nullcontext():
        results = call()
    if d.replayed:
        with module.keeping(keep.replay()):
            results = call()
    of_first, results = ([*x] if isinstance(x, tuple) else [x] for x in (first, results))
    wrong = [] if all(map(torch.equal, of_first, results)) else ["results without gradients"]
    names = ["out", *(["joint_out"] if d.joint_queries else [])]
    names += [name.replace("out", "lse") for name in names] if d.return_lse else []
    found = dict(zip([*names, *(["weights"] if d.return_weights else [])], results, strict=True))
    with sent:
        backward(d, mesh, found, exact, grads)
    for name, x in leaves.items():
        if x.is_floating_point():
            found[f"d{name}"] = x.grad if x.grad is not None else torch.full_like(x, torch.nan)
    wrong += [f"{name} in {x.dtype}" for name, x in found.items() if x.dtype != d.dtype and "lse" not in name]
    wrong += [f"kernels {module.kernels}"] if d.indices[0] and module.kernels != {"gather"} else []
    planned = predicted(d, module, whole)
    wrong += [f"bytes {sent.total}, not {planned}"] if sent.total != planned else []
    if d.return_weights:
        found["weights"] = by_block(d, found["weights"], leaves["indices"])
    return wrong + [f"{name} by {error:.1e}" for name, error in errors(d, mesh, found, exact).items()]


def backward(
    d: Draw, mesh: ParallelMesh, found: dict[str, Tensor], exact: dict[str, Tensor], grads: dict[str, Tensor]
) -> None:
    """Run the backward of all results but weights, for the losses of `expected`."""
    of_results = []
    for name, x in found.items():
        if name == "weights":
            continue
        grad = grads[f"d{name.removeprefix('joint_')}"]
        grad = grad[:, d.tokens :] if name.startswith("joint") else grad[:, : d.tokens]
        grad = grad.where(exact[name].isfinite(), 0)
        # The gradients of a joint result add up over the ranks.
        share = (1 + mesh.rank("sp")) / sum(range(1, mesh.size("sp") + 1)) if name.startswith("joint") else 1
        of_results.append((x, (sharded(d, mesh, name, grad) * share).to(x.dtype)))
    torch.autograd.backward(*(list(x) for x in zip(*of_results, strict=True)))


def by_block(d: Draw, weights: Tensor, indices: Tensor) -> Tensor:
    """Return the sums (B, S, blocks) of the weights of indices, which begin blocks of keys."""
    blocks = torch.zeros(*weights.shape[:2], -(-d.tokens // d.indices[2]), dtype=torch.float64)
    return blocks.scatter_add_(-1, indices.clamp(min=0) // d.indices[2], weights.double())


def errors(d: Draw, mesh: ParallelMesh, found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Return the L2 errors, relative to a tensor's own size and that of numbers, that exceed the tolerance."""
    squares = []
    for name, x in found.items():
        x, wanted = x.detach().double(), sharded(d, mesh, name, exact[name])
        if name.startswith("djoint") or name == "dsinks":
            dist.all_reduce(x, group=mesh.group("sp"))
        if name == "lse":  # tokens that only fill the last rank up have none
            x = x.where(sharded(d, mesh, name, torch.ones_like(exact[name])) > 0, 0)
        same, hidden = torch.equal(x.isinf(), wanted.isinf()), wanted.isinf()
        error = (x.masked_fill(hidden, 0) - wanted.masked_fill(hidden, 0)).square().sum() if same else torch.inf
        # Gradients of few keys are sums over many queries, which may cancel.
        terms = 0.01 * max(wanted.numel(), found["out"].numel(), 1) if "tolerance" not in d else 0.0
        squares.append([float(error), float(wanted.masked_fill(hidden, 0).square().sum()), terms])
    total = torch.tensor(squares, dtype=torch.float64)
    dist.all_reduce(total, group=mesh.group("sp"))
    size = total[:, 1] + total[:, 2]
    relative = (total[:, 0] / size.where(size > 0, 1.0)).sqrt().tolist()
    most = d.get("tolerance", TOLERANCES[d.dtype])
    return {name: x for name, x in zip(found, relative, strict=True) if not x <= most}


def predicted(d: Draw, module: UnifiedSPAttention, whole: dict[str, Tensor]) -> int:
    """Return the bytes that this rank should send."""
    arguments, (n, kv), (size, v_size) = mask_arguments(d), d.heads, d.head_dims
    indices = whole.get("indices")
    if indices is not None:
        missing = -d.tokens % SequenceLayout.multiple_of(d.layout, *d.grid)
        indices = torch.cat((indices, indices.new_zeros(d.batch, missing, *indices.shape[2:])), 1)
    q, k = (d.batch, d.tokens, n, size), (d.batch, d.key_tokens, kv, size) if d.key_tokens else None
    plan = plan_of(module, q, k, (d.joint, d.joint_queries, kv), **arguments)
    sparse = {"indices": indices, "weights": d.return_weights, "block": d.indices[2]}
    return plan.wire_bytes(d.dtype, v_size, d.return_lse, **sparse).total


@dataclass(frozen=True)
class Fault:
    """A fault that the search must find: another attribute of an object, made from the right one, and in which draws
    it matters."""

    owner: Any
    name: str
    wrong: Callable[[Any], Any]
    matters: Callable[[Draw], bool]

    def patch(self) -> AbstractContextManager[Any]:
        return mock.patch.object(self.owner, self.name, self.wrong(getattr(self.owner, self.name)))


def _wider(difference_range: Callable[..., tuple[int | None, int | None]]) -> Callable[..., Any]:
    def wider(*arguments: Any) -> tuple[int | None, int | None]:
        lowest, highest = difference_range(*arguments)
        return lowest, None if highest is None else highest + 1

    return wider


def _places_of_last(even_places: Callable[..., Any]) -> Callable[..., Any]:
    def places(plan: HeadPlan, rank: int) -> Any:
        found = even_places(plan, rank)
        return found and (max(found[1]) // plan.kv_width(rank) + 1, found[1])

    return places


def _last_has_fewer(d: Draw) -> bool:
    """Return whether the last KV head of some Ulysses rank has fewer query heads than another one."""
    plan = HeadPlan(*d.heads, d.grid[1])
    return any(plan.even_places(rank) != _places_of_last(HeadPlan.even_places)(plan, rank) for rank in range(d.grid[1]))


FAULTS = {
    "a wider window": Fault(
        AttentionSpec, "difference_range", _wider, lambda d: d.window is not None and 0 <= d.window[0] < d.tokens // 4
    ),
    "no gradient of another ring rank": Fault(
        ring, "_add", lambda _: lambda *_: None, lambda d: d.grid[0] > 2 and d.keys_of == "itself" and not d.indices[0]
    ),
    "no gradient of a received key": Fault(
        sparse, "_returned", lambda _: lambda dk, dv, choice, *_: (dk[: len(choice.index)], dv[: len(choice.index)]),
        lambda d: d.grid[0] > 1 and d.indices[0] != "",
    ),
    "a wrong lse of a part": Fault(
        accumulate, "merge", lambda merge: lambda out, lse, more, more_lse: merge(out, lse, more, more_lse + 1e-3),
        lambda d: d.grid[0] > 1 and d.return_lse and d.keys_of == "itself",
    ),
    "no gradient of the lse": Fault(
        ring.RingAttention, "backward",
        lambda backward: staticmethod(lambda ctx, dout, dlse: backward(ctx, dout, torch.zeros_like(dlse))),
        lambda d: d.return_lse,
    ),
    "another KV head": Fault(
        HeadPlan, "even_places", _places_of_last, lambda d: d.indices[0] == "KV heads" and _last_has_fewer(d)
    ),
}  # fmt: skip


def search(draws: Sequence[Draw], fault: str = "") -> list[str]:
    """Return a line for each wrong draw. Collective."""
    meshes: dict[Any, ParallelMesh] = {}
    lines = []
    for draw in draws:
        try:
            with FAULTS[fault].patch() if fault else nullcontext():
                wrong = check(draw, meshes)
        except Exception as error:
            raise AssertionError(f"{draw}") from error
        if wrong:
            lines.append(f"{draw}: {'; '.join(wrong)}")
    return lines


def searched(ranks: RankPool, seeds: Sequence[int], world_size: int, fault: str = "") -> list[str]:
    """Return the lines of all ranks, each once."""
    per_rank = ranks.run(search, world_size, [Draw.of(seed, world_size) for seed in seeds], fault)
    return [*dict.fromkeys(line for of_rank in per_rank for line in of_rank)]


def assert_exact(ranks: RankPool, draws: Sequence[Draw], run: Callable[..., list[str]] = search) -> None:
    """Check draws that are made for as many ranks each; run: `search`, or a function that calls it on each rank."""
    assert draws
    per_rank = ranks.run(run, draws[0].ranks, draws)
    assert not any(per_rank), "\n".join(dict.fromkeys(line for lines in per_rank for line in lines))


@pytest.mark.parametrize(("world_size", "draws", "all_draws"), [(4, 40, 2000), (6, 4, 500), (8, 4, 500)])
@pytest.mark.slow
def test_random_calls(ranks: RankPool, exhaustive: bool, world_size: int, draws: int, all_draws: int) -> None:
    wrong = searched(ranks, range(all_draws if exhaustive else draws), world_size)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", FAULTS)
def test_the_search_finds_a_fault(ranks: RankPool, name: str) -> None:
    draws = (Draw.of(seed, 4) for seed in range(1000))
    seeds = [draw.seed for draw in draws if FAULTS[name].matters(draw)][:4]
    assert any(searched(ranks, [seed], 4, name) for seed in seeds)


if __name__ == "__main__":
    world, first, count = (int(argument) for argument in (*sys.argv[1:], "1")[:3])
    with RankPool() as pool:
        every = []
        for start in range(first, first + count, 50):
            found = searched(pool, range(start, min(start + 50, first + count)), world)
            every += found
            print(*found, f"{start}: {len(every)} wrong", sep="\n", flush=True)
    sys.exit(bool(every))

"""The recurrences of transformers' layers, as affine maps of their state.

Each wraps a kernel that transformers calls: the torch code of the model's file, or the package that it found installed.

n segments, L tokens of the longest, H value heads, G groups, K and V key and value head dims, P head dim, N state size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from usp.sp.scan import FromZero

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class DeltaRule:
    """The gated delta rule (arXiv 2412.06464, section 3), with decays per head or, in Kimi Linear, per key channel.

    Its state S (K x V) becomes (I - beta k k^T) diag(exp g) S + beta k v^T, each column on its own. So K more columns,
    which begin as the identity and get zero values, end as the transition, and what the queries read from them is
    what each output takes from the incoming state.

    Inputs: q, k (n, L, heads, K), v (n, L, H, V), g (n, L, H) or (n, L, H, K), beta (n, L, H).
    """

    kernel: Kernel
    token_kernel: Kernel  # the same, for single tokens
    state: tuple[int, ...]
    options: Mapping[str, Any]
    mixing: bool = True

    def __call__(self, inputs: Sequence[Tensor], carried: bool) -> FromZero:
        q, k, v, g, beta = inputs
        heads, key_dim, value_dim = self.state
        initial = None
        if carried:
            v = torch.cat((v, v.new_zeros(*v.shape[:-1], key_dim)), dim=-1)
            initial = torch.zeros(len(v), heads, key_dim, value_dim + key_dim, device=v.device)
            initial[..., value_dim:] = torch.eye(key_dim, device=v.device)
        out, final = self.kernel(
            q, k, v, g=g, beta=beta, initial_state=initial, output_final_state=True, **self.options
        )
        if not carried:
            return FromZero(out, final, None, None)
        out, reads = out.split((value_dim, key_dim), dim=-1)
        final, transition = final.split((value_dim, key_dim), dim=-1)

        def read(states: Tensor) -> Tensor:
            return torch.einsum("nlhk,nhkv->nlhv", reads.to(states.dtype), states)

        return FromZero(out, final, transition, read)

    def step(self, inputs: Sequence[Tensor], state: Tensor, own: slice) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (_per_head(x, self.state[0])[:, own].unsqueeze(1) for x in inputs)
        options = {"initial_state": state, "output_final_state": True, **self.options}
        out, after = self.token_kernel(q, k, v, g=g, beta=beta, **options)
        return out.squeeze(1), after


@dataclass(frozen=True)
class StateSpace:
    """Mamba-2 (arXiv 2405.21060, section 2): the state of a head decays by exp(dt A), A being a number per head.

    Inputs: x (n, L, H, P), dt (n, L, H) after its softplus and limits, B, C (n, L, G, N).
    """

    kernel: Kernel
    state: tuple[int, ...]  # (H, P, N)
    A: Tensor
    D: Tensor | None
    chunk_size: int
    mixing: bool = False

    def __call__(self, inputs: Sequence[Tensor], carried: bool) -> FromZero:
        x, dt, B, C = inputs
        out, final = self.kernel(x, dt, self.A, B, C, chunk_size=self.chunk_size, D=self.D, return_final_states=True)
        if not carried:
            return FromZero(out, final, None, None)
        decay = torch.cumsum(dt * self.A, dim=1)

        def read(states: Tensor) -> Tensor:
            by_group = states.unflatten(1, (C.shape[2], -1))
            found = torch.einsum("nlgs,ngrps->nlgrp", C.to(states.dtype), by_group).flatten(2, 3)
            return found * decay.exp().unsqueeze(-1)

        return FromZero(out, final, decay[:, -1].exp()[..., None, None], read)

    def step(self, inputs: Sequence[Tensor], state: Tensor, own: slice) -> tuple[Tensor, Tensor]:
        x, dt, B, C = (_per_head(part, self.state[0])[:, own].float() for part in inputs)
        decay = (dt * self.A[own]).exp()[..., None, None]
        after = state * decay + (dt.unsqueeze(-1) * x).unsqueeze(-1) * B.unsqueeze(2)
        out = (after @ C.unsqueeze(-1)).squeeze(-1)
        if self.D is not None:
            out = out + self.D[own].unsqueeze(-1) * x
        return out, after


@dataclass(frozen=True)
class SelectiveScan:
    """Mamba (arXiv 2312.00752, section 3): each of N states of a channel decays by exp(dt A) with its own A.

    Inputs: x, dt (n, L, channels), dt after its softplus, B, C (n, L, N).
    """

    kernel: Kernel
    state: tuple[int, ...]  # (channels, N)
    A: Tensor
    D: Tensor | None
    options: Mapping[str, Any]
    mixing: bool = False

    def __call__(self, inputs: Sequence[Tensor], carried: bool) -> FromZero:
        x, dt, B, C = (tokens.transpose(1, 2) for tokens in inputs)
        out, final = self.kernel(x, dt, self.A, B, C, D=self.D, return_last_state=True, **self.options)
        out = out.transpose(1, 2)
        if not carried:
            return FromZero(out, final, None, None)
        decay = torch.cumsum(inputs[1], dim=1)

        def read(states: Tensor) -> Tensor:
            decayed = (decay.unsqueeze(-1) * self.A).exp() * states.unsqueeze(1)
            return (decayed @ inputs[3].to(states.dtype).unsqueeze(-1)).squeeze(-1)

        return FromZero(out, final, (decay[:, -1].unsqueeze(-1) * self.A).exp(), read)

    def step(self, inputs: Sequence[Tensor], state: Tensor, own: slice) -> tuple[Tensor, Tensor]:
        x, dt, B, C = (part.float() for part in inputs)
        x, dt = x[:, own], dt[:, own]
        after = state * (dt.unsqueeze(-1) * self.A[own]).exp() + (dt * x).unsqueeze(-1) * B.unsqueeze(1)
        out = (after @ C.unsqueeze(-1)).squeeze(-1)
        return (out if self.D is None else out + self.D[own] * x).to(inputs[0].dtype), after


def _per_head(x: Tensor, heads: int) -> Tensor:
    """Repeat the groups of (n, groups, ...) for each of their heads."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)

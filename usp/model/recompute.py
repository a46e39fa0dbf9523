"""Activation checkpointing and tiled MLPs for decoder layers.

    none                saves all activations
    attention-saved     selective: saves the layer's input, attention's results and what recurrent layers receive from
                        other ranks; recomputes the rest
    full                saves the layer's input; recomputes everything, including attention's communication

Only a layer's `forward` is replaced: no module is wrapped, so parameters keep their names, and hooks (of FSDP2 or
tensor parallelism) stay outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from attention import Keep, KeepResults
from usp.config import AC_MODES
from usp.sp.in_order import SequenceOrder
from usp.sp.sp_attention import UnifiedSPAttention


class Keeping(Protocol):
    """What passes the steps of its calls to a `Keep` while a checkpointed layer runs."""

    def keeping(self, keep: Keep) -> AbstractContextManager[None]: ...


def apply_activation_checkpointing(
    layers: Iterable[nn.Module],
    mode: str,
    attention: UnifiedSPAttention | None = None,
    offload: bool = False,
    order: SequenceOrder | None = None,
) -> None:
    """Apply activation checkpointing (arXiv 1604.06174) to decoder layers, in place. Call it before FSDP2.

    `full` saves the input of each layer, one hidden state per token. `attention-saved` additionally saves the tensors
    that are expensive to recompute, so that no kernel, all-to-all or ring hop of `attention` runs twice. Per token of
    this rank, with N query and K KV heads of size H (V for v):

    - ulysses = 1: attention's output (N * V) and lse (N, fp32); q, k and v are recomputed by the projections;
    - ulysses > 1: also q, k, v after their all-to-all (N * H + K * (H + V), more if KV heads are replicated) and the
      output after its own (N * V).

    Recurrent layers and convolutions are recomputed, but their messages are not sent again: incoming states and halos
    are saved, which are small, and with striped tokens on a ring their layers' inputs and outputs.

    Several forwards may precede their backwards. A backward may be split in two (inputs, then weights); each part
    recomputes. Forward hooks inside a layer run again in its backward.

    Args:
        attention: the attention layer that all `layers` share; required by `attention-saved`.
        offload: store saved tensors in host memory, pinned if the layer runs on CUDA.
        order: what recurrent layers and convolutions run through, if `layers` have any.

    Raises:
        ValueError: for an unknown mode, missing `attention`, offloading without checkpointing, or layers that are
            already checkpointed.
    """
    layers = [layer for layer in layers if _has_parameters(layer)]
    violations = []
    if mode not in AC_MODES:
        violations.append(f"mode={mode!r} must be one of {', '.join(AC_MODES)}")
    if mode == "attention-saved" and attention is None:
        violations.append("mode='attention-saved' needs attention, the layer that all layers share")
    if mode == "none" and offload:
        violations.append("offload=True requires activation checkpointing, but mode='none' disables it: use 'full'")
    if any(getattr(layer.forward, "recomputes", False) for layer in layers):
        violations.append("a layer's forward is already replaced: apply activation checkpointing only once")
    if violations:
        raise ValueError("; ".join(violations))
    kept = [part for part in (attention, order) if part is not None] if mode == "attention-saved" else []
    if mode != "none":
        for layer in layers:
            layer.forward = _checkpointed(layer.forward, kept, offload)


def _checkpointed(forward: Callable[..., Any], kept: Sequence[Keeping], offload: bool) -> Callable[..., Any]:
    def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Around the checkpoint, not inside, so that the hooks offload what it saves: its input.
        host = save_on_cpu(pin_memory=hidden.is_cuda) if offload else None

        def passes() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            keep = KeepResults(host.pack_hook, host.unpack_hook) if host else KeepResults()
            return _During(kept, lambda: keep), _During(kept, keep.replay)

        with host or nullcontext():
            return checkpoint(forward, hidden, *args, use_reentrant=False, context_fn=passes, **kwargs)

    run.recomputes = True  # type: ignore[attr-defined]
    return run


class _During:
    """Context of one pass of a checkpointed layer; each time it is entered, a new `keep` takes the layer's steps."""

    def __init__(self, kept: Sequence[Keeping], keep: Callable[[], Keep]) -> None:
        self.kept, self.keep = kept, keep

    def __enter__(self) -> None:
        self.stack, keep = ExitStack(), self.keep()
        for part in self.kept:
            self.stack.enter_context(part.keeping(keep))

    def __exit__(self, *error: Any) -> None:
        self.stack.close()


def apply_tiled_mlp(layers: Iterable[nn.Module], tile_tokens: int, backend: str = "") -> None:
    """Run each layer's `mlp` on tiles of `tile_tokens` tokens per row, in place, so that only one tile's intermediate
    activations exist (as in Arctic Long Sequence Training, arXiv 2506.13996, section 3.1.2). Call it before FSDP2.
    With a `backend` of torch.compile, the computation of a tile is a graph; `compile_layers` must leave `mlp` eager.

    Each tile is recomputed in the backward. Inside a checkpointed layer, the MLP's forward runs three times, and still
    only one tile's intermediates exist.

    Raises:
        ValueError: for tiles without tokens, and layers without an `mlp`, with experts, or already tiled.
    """
    mlps: list[Any] = [getattr(layer, "mlp", None) for layer in layers if _has_parameters(layer)]
    violations = []
    if tile_tokens < 1:
        violations.append(f"tile_tokens={tile_tokens} must be at least 1")
    if None in mlps:
        violations.append("every layer must have its feed-forward block in `mlp`")
    if any(hasattr(mlp, "experts") for mlp in mlps):
        violations.append("experts do not support tiling, they route all tokens of a rank together: disable it")
    if any(mlp is not None and "forward" in vars(mlp) for mlp in mlps):
        violations.append("an MLP's forward is already replaced: apply tiling only once")
    if violations:
        raise ValueError("; ".join(violations))
    for mlp in mlps:
        forward = torch.compile(mlp.forward, backend=backend) if backend else mlp.forward
        mlp.forward = _tiled(forward, tile_tokens)


def _tiled(forward: Callable[[Tensor], Tensor], tile_tokens: int) -> Callable[[Tensor], Tensor]:
    def run(x_BSH: Tensor) -> Tensor:
        tiles = x_BSH.split(tile_tokens, dim=1)
        return torch.cat([checkpoint(forward, tile, use_reentrant=False) for tile in tiles], dim=1)

    return run


def _has_parameters(layer: nn.Module) -> bool:
    """Return whether the layer belongs to this pipeline stage."""
    return next(layer.parameters(), None) is not None

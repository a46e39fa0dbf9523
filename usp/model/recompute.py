"""Long sequences in little memory: what a decoder layer keeps between its forward and its backward.

    none                everything
    attention-saved     its input and what attention computed; the rest runs a second time in the backward
    full                its input; all of it runs a second time, attention's communication included

Both change a layer's `forward` alone: no module is wrapped, so parameters keep their names, and hooks (FSDP2's, tensor
parallelism's) stay outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from attention import KeepResults
from usp.config import AC_MODES
from usp.sp.sp_attention import UnifiedSPAttention


def apply_activation_checkpointing(
    layers: Iterable[nn.Module], mode: str, attention: UnifiedSPAttention | None = None, offload: bool = False
) -> None:
    """Recompute decoder layers in the backward (arXiv 1604.06174), in place. Call it before FSDP2.

    `full` keeps the input of each layer, one hidden state per token. `attention-saved` keeps besides what is dear to
    compute again, so that neither a kernel nor an all-to-all nor a ring hop of `attention` runs twice. For each token
    of this rank, N query and K KV heads of size H:

    - with ulysses = 1: attention's output (N * H) and lse (N, fp32). q, k and v follow from the projections;
    - with ulysses > 1: the same, and q, k, v after their all-to-all ((N + 2 K) * H, more where KV heads are
      replicated) and the output after its own (N * H).

    Several forwards may precede their backwards, and a backward may come in two halves (inputs, then weights): each
    half recomputes. Forward hooks inside a layer run again in its backward.

    Args:
        attention: the layer that all `layers` attend through; `attention-saved` needs it.
        offload: what is kept waits in host memory, pinned where the layer runs on CUDA.

    Raises:
        ValueError: for an unknown mode, a lack of `attention`, nothing to offload, and layers that are checkpointed
            already.
    """
    layers = [layer for layer in layers if _has_parameters(layer)]
    violations = []
    if mode not in AC_MODES:
        violations.append(f"mode={mode!r} must be one of {', '.join(AC_MODES)}")
    if mode == "attention-saved" and attention is None:
        violations.append("mode='attention-saved' needs the attention that the layers go through")
    if mode == "none" and offload:
        violations.append("offload=True moves what checkpointing keeps, and mode='none' keeps everything: use 'full'")
    if any("forward" in vars(layer) for layer in layers):
        violations.append("a layer's forward has been replaced already: apply activation checkpointing once")
    if violations:
        raise ValueError("; ".join(violations))
    if mode != "none":
        for layer in layers:
            kept = attention if mode == "attention-saved" else None
            layer.forward = _checkpointed(layer.forward, kept, offload)


def _checkpointed(
    forward: Callable[..., Any], attention: UnifiedSPAttention | None, offload: bool
) -> Callable[..., Any]:
    def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Around the call, not inside: the hooks see what the checkpoint itself saves, its input.
        host = save_on_cpu(pin_memory=hidden.is_cuda) if offload else None

        def passes() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            if attention is None:
                return nullcontext(), nullcontext()
            keep = KeepResults(host.pack_hook, host.unpack_hook) if host else KeepResults()
            return attention.keeping(keep), _Replay(attention, keep)

        with host or nullcontext():
            return checkpoint(forward, hidden, *args, use_reentrant=False, context_fn=passes, **kwargs)

    return run


class _Replay:
    """The context of a recomputation: entered anew by each, it gives back what was kept from the first on."""

    def __init__(self, attention: UnifiedSPAttention, keep: KeepResults) -> None:
        self.attention, self.keep = attention, keep

    def __enter__(self) -> None:
        self.context = self.attention.keeping(self.keep.replay())
        self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)


def tiled_mlp_violations(layers: Iterable[nn.Module], tile_tokens: int) -> list[str]:
    """Why `apply_tiled_mlp` would refuse."""
    violations = []
    if tile_tokens < 1:
        violations.append(f"tile_tokens={tile_tokens} must be at least 1")
    mlps = [getattr(layer, "mlp", None) for layer in layers if _has_parameters(layer)]
    if any(mlp is None for mlp in mlps):
        violations.append("every layer must have its feed-forward block as `mlp`")
    if any(hasattr(mlp, "experts") for mlp in mlps):
        violations.append("experts route all tokens of a rank together and are not cut into tiles: drop the tiles")
    if any(mlp is not None and "forward" in vars(mlp) for mlp in mlps):
        violations.append("an MLP's forward has been replaced already: cut it into tiles once")
    return violations


def apply_tiled_mlp(layers: Iterable[nn.Module], tile_tokens: int) -> None:
    """Run each layer's `mlp` on `tile_tokens` tokens of every row at a time, in place: its intermediate activations
    exist for one tile (as in Arctic long sequence training, arXiv 2506.13996, section 3.1.2). Call it before FSDP2.

    Each tile is computed again in the backward. A checkpointed layer, which is itself computed again, keeps its tiles:
    the MLP's forward then runs three times, and one tile's intermediates are still all that exist.

    Raises:
        ValueError: naming everything that `tiled_mlp_violations` finds.
    """
    layers = [layer for layer in layers if _has_parameters(layer)]
    violations = tiled_mlp_violations(layers, tile_tokens)
    if violations:
        raise ValueError("; ".join(violations))
    for layer in layers:
        mlp = layer.mlp
        assert isinstance(mlp, nn.Module)
        mlp.forward = _tiled(mlp.forward, tile_tokens)


def _tiled(forward: Callable[[Tensor], Tensor], tile_tokens: int) -> Callable[[Tensor], Tensor]:
    def run(x_BSH: Tensor) -> Tensor:
        tiles = x_BSH.split(tile_tokens, dim=1)
        return torch.cat([checkpoint(forward, tile, use_reentrant=False) for tile in tiles], dim=1)

    return run


def _has_parameters(layer: nn.Module) -> bool:
    """Whether the layer is of this pipeline stage."""
    return next(layer.parameters(), None) is not None

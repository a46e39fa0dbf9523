"""torch.compile of decoder layers.

Each layer's `forward` becomes one graph, in which attention is one operator (`usp.sp.operator`). A module that cannot
be in a graph stays eager, and divides its layer's graph in two. Layers of one kind share their graphs.

Only `forward` is replaced: no module is wrapped, so parameters keep their names, and hooks (of FSDP2) and activation
checkpointing stay outside of the graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def compile_layers(layers: Iterable[nn.Module], backend: str, eager: Iterable[nn.Module] = ()) -> None:
    """Compile decoder layers, in place, when they are first called. Call it before activation checkpointing and FSDP2.

    Args:
        backend: of torch.compile, such as inductor.
        eager: modules inside the layers that stay out of the graphs, because what they compute depends on values (a
            routing of tokens), or because they communicate.
    """
    for module in eager:
        module.forward = torch.compiler.disable(module.forward, reason=f"{type(module).__name__} stays eager")
    layers = [layer for layer in layers if next(layer.parameters(), None) is not None]  # of this pipeline stage
    # A layer whose submodules have hooks, such as those of tensor parallelism, shares no graphs with other layers.
    limit = torch._dynamo.config.recompile_limit * len(layers)
    for layer in layers:
        layer.forward = _compiled(layer.forward, backend, limit)


def _compiled(forward: Callable[..., Any], backend: str, limit: int) -> Callable[..., Any]:
    options: Any = {"backend": backend, "recompile_limit": limit}
    compiled = torch.compile(forward, **options)

    def run(*args: Any, **kwargs: Any) -> Any:
        documents = kwargs.get("cu_seqlens")
        if documents is not None:  # another number of them shall not need another graph
            torch._dynamo.maybe_mark_dynamic(documents, documents.dim() - 1)
        return compiled(*args, **kwargs)

    return run

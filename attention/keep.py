"""Activation checkpointing of attention: compute without saving, save the results, or replay saved results.

A checkpointed layer runs twice, but its attention need not: the first pass runs every expensive step through
`KeepResults`, the second through its `replay()`, which neither computes nor communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

Results: TypeAlias = tuple[Any, ...]
Step: TypeAlias = tuple[Any, ...]  # identifies a step and its inputs
Keep: TypeAlias = Callable[[Step, Callable[[], Results]], Results]


def compute_now(step: Step, compute: Callable[[], Results]) -> Results:
    """Compute a step without saving its results."""
    return compute()


class KeepResults:
    """Computes each step and saves its results, in order.

    Args:
        pack, unpack: save and restore a tensor, for example by offloading it to host memory.
    """

    def __init__(self, pack: Callable[[Tensor], Any] = lambda x: x, unpack: Callable[[Any], Tensor] = lambda x: x):
        self._pack, self._unpack = pack, unpack
        self._kept: list[tuple[Step, list[tuple[bool, Any]]]] = []

    def __call__(self, step: Step, compute: Callable[[], Results]) -> Results:
        results = compute()
        # A saved result must not keep the autograd graph alive.
        packed = [(True, self._pack(x.detach())) if isinstance(x, Tensor) else (False, x) for x in results]
        self._kept.append((step, packed))
        return results

    def replay(self) -> Keep:
        """Return a function that replays the results from the first step on.

        May be called repeatedly: a split backward recomputes twice. The returned function raises RuntimeError if the
        second pass takes different steps from the first.
        """
        kept = iter(self._kept)

        def restore(step: Step, compute: Callable[[], Results]) -> Results:
            recorded, packed = next(kept, (None, []))
            if recorded != step:
                raise RuntimeError(
                    f"attention's second pass asks for {step} where the first kept {recorded or 'nothing more'}: a "
                    f"checkpointed layer must take the same steps in both passes"
                )
            return tuple(self._unpack(x).detach() if is_tensor else x for is_tensor, x in packed)

        return restore

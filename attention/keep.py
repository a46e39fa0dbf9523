"""Activation checkpointing of expensive steps: compute without saving, save the results, or replay saved results.

A checkpointed layer runs twice, but its attention need not: the first pass runs every expensive step through
`KeepResults`, the second through its `replay()`, which neither computes nor communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

Results: TypeAlias = tuple[Any, ...]
Step: TypeAlias = tuple[Any, ...]  # identifies a step and its inputs
_Packed: TypeAlias = list[tuple[int | None, Any]]  # results: (version, packed tensor), or (None, what is no tensor)
Keep: TypeAlias = Callable[[Step, Callable[[], Results]], Results]


def compute_now(step: Step, compute: Callable[[], Results]) -> Results:
    """Compute a step without saving its results."""
    return compute()


class KeepResults:
    """Computes each step and saves its results, in order. Steps that are taken inside of a step are part of it.

    Args:
        pack, unpack: save and restore a tensor, for example by offloading it to host memory.
    """

    def __init__(self, pack: Callable[[Tensor], Any] = lambda x: x, unpack: Callable[[Any], Tensor] = lambda x: x):
        self._pack, self._unpack = pack, unpack
        self._kept: list[tuple[Step, _Packed | None]] = []
        self._inside = False

    def __call__(self, step: Step, compute: Callable[[], Results]) -> Results:
        if self._inside:
            return compute()
        self._inside = True
        try:
            results = compute()
        finally:
            self._inside = False
        # A saved result must not keep the autograd graph alive.
        packed: _Packed = [
            (x._version, self._pack(x.detach())) if isinstance(x, Tensor) else (None, x) for x in results
        ]
        self._kept.append((step, packed))
        return results

    def forget_last(self, kind: str) -> None:
        """Free the results of the last step, if it begins with `kind`; a replay that asks for it computes it again."""
        if self._kept and self._kept[-1][0][0] == kind:
            self._kept[-1] = (self._kept[-1][0], None)

    def replay(self) -> Keep:
        """Return a function that replays the results from the first step on.

        May be called repeatedly: a split backward recomputes twice. The returned function raises RuntimeError if the
        second pass takes different steps from the first, or a saved result was changed in place.
        """
        kept = iter(self._kept)

        def restore(step: Step, compute: Callable[[], Results]) -> Results:
            recorded, packed = next(kept, (None, []))
            if recorded != step:
                raise RuntimeError(
                    f"attention's second pass asks for {step} where the first kept {recorded or 'nothing more'}: a "
                    f"checkpointed layer must take the same steps in both passes"
                )
            if packed is None:
                return compute()
            return tuple(x if version is None else self._restore(step, version, x) for version, x in packed)

        return restore

    def _restore(self, step: Step, version: int, packed: Any) -> Tensor:
        if isinstance(packed, Tensor) and packed._version != version:
            raise RuntimeError(f"a result of {step} was changed in place after it had been saved")
        return self._unpack(packed).detach()

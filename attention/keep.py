"""What activation checkpointing does with attention: compute as ever, keep the results, or give kept ones back.

A checkpointed layer runs twice, and its attention need not: the first pass hands every costly step to `KeepResults`,
the second to its `replay()`, which computes and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

Results: TypeAlias = tuple[Any, ...]
Step: TypeAlias = tuple[Any, ...]  # names a step and what it works on, to tell it from another
Keep: TypeAlias = Callable[[Step, Callable[[], Results]], Results]


def compute_now(step: Step, compute: Callable[[], Results]) -> Results:
    """Neither keep nor give back."""
    return compute()


def _same(x: Any) -> Any:
    return x


class KeepResults:
    """Computes each step and keeps its results, in order.

    Args:
        pack, unpack: how a tensor is kept, and its way back: to host memory, say.
    """

    def __init__(self, pack: Callable[[Tensor], Any] = _same, unpack: Callable[[Any], Tensor] = _same) -> None:
        self._pack, self._unpack = pack, unpack
        self._kept: list[tuple[Step, list[tuple[bool, Any]]]] = []

    def __call__(self, step: Step, compute: Callable[[], Results]) -> Results:
        results = compute()
        # Detached: a kept result must not hold the graph that will be freed with it.
        packed = [(True, self._pack(x.detach())) if isinstance(x, Tensor) else (False, x) for x in results]
        self._kept.append((step, packed))
        return results

    def replay(self) -> Keep:
        """Gives the results back from the first on, as often as asked: a backward in two halves recomputes twice.

        What it returns raises RuntimeError where the second pass takes other steps than the first.
        """
        kept = iter(self._kept)

        def give_back(step: Step, compute: Callable[[], Results]) -> Results:
            recorded, packed = next(kept, (None, []))
            if recorded != step:
                raise RuntimeError(
                    f"attention's second pass asks for {step} where the first kept {recorded or 'nothing more'}: a "
                    f"checkpointed layer must take the same steps in both passes"
                )
            return tuple(self._unpack(x).detach() if is_tensor else x for is_tensor, x in packed)

        return give_back

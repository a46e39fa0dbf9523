"""GRPO under other names: presets of its options, and objectives that clip otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .grpo import GRPO, grpo_algorithm
from .loss_weights import Aggregation
from .objectives import ClippedSequences, ClippedWeights


@dataclass(frozen=True)
class DrGRPO(GRPO):
    """Options of Dr. GRPO (arXiv 2503.20783): no division by standard deviations and lengths, and no KL penalty."""

    kl: float = 0.0
    aggregation: Aggregation = "constant"
    scale_by_std: bool = False


@dataclass(frozen=True)
class DAPO(GRPO):
    """Options of DAPO (arXiv 2503.14476): a higher upper bound, means over tokens, and only groups that differ.

    `oversample` and `overlong_buffer`, its dynamic sampling and its penalty, depend on the task: by default there are
    none.
    """

    kl: float = 0.0
    eps_high: float = 0.28
    aggregation: Aggregation = "token_mean"
    drop_equal_groups: bool = True


@dataclass(frozen=True)
class GSPO(GRPO):
    """Options of GSPO (arXiv 2507.18071): one ratio per response (`ClippedSequences`), and the paper's bounds."""

    objective_type = ClippedSequences
    mini_batches: int = 4
    kl: float = 0.0
    eps_low: float = 3e-4
    eps_high: float = 4e-4
    dual_clip: float = math.inf


@dataclass(frozen=True)
class CISPO(GRPO):
    """Options of CISPO (MiniMax-M1, arXiv 2506.13585): clipped weights of the gradient, see `ClippedWeights`.

    As in the paper, there is no lower bound; the upper one is 5.
    """

    objective_type = ClippedWeights
    mini_batches: int = 4
    kl: float = 0.0
    eps_low: float = 1.0
    eps_high: float = 4.0
    dual_clip: float = math.inf
    aggregation: Aggregation = "token_mean"

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        if self.dual_clip != math.inf:
            yield f"dual_clip={self.dual_clip} has no effect on CISPO, which clips every ratio: remove it"


DR_GRPO_ALGORITHM, DAPO_ALGORITHM, GSPO_ALGORITHM, CISPO_ALGORITHM = map(grpo_algorithm, (DrGRPO, DAPO, GSPO, CISPO))

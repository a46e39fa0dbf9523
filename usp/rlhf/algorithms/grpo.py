"""Group-relative policy optimization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from usp.rlhf.data.samples import Samples
from usp.rlhf.graph.calls import Generate, ModelCall, Reduce

from .algorithm import Algorithm, at_least, one_of
from .loss_weights import Aggregation
from .objectives import ClippedPolicy, Estimator
from .policy import Batch, PolicyOptions, policy_calls
from .response_rows import per_sample
from .rewards import RewardShape

_EQUAL = 1e-6  # rewards closer than this are equal: a reward model's differ by rounding between layouts
_STD_EPSILON = 1e-4  # added to a group's standard deviation, so that such differences stay small


@dataclass(frozen=True)
class GRPO(PolicyOptions):
    """Options of GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1): no critic, KL penalty in the loss.

    Attributes:
        kl_estimator: of the KL term in the loss.
        scale_by_std: divide a reward's distance from its group's mean by the group's standard deviation.
        drop_equal_groups: exclude groups with equal rewards from the loss and its normalization; a mini-batch of only
            such groups has gradient 0.
        oversample: draw that many times the prompts of a step, and train on the first of them whose groups differ, at
            most as many as without: DAPO's dynamic sampling (arXiv 2503.14476, section 3.2) with a fixed bound. Needs
            `drop_equal_groups`. Groups that are not trained on still pass through the train step, with weight 0.
        overlong_buffer, overlong_penalty: see `RewardShape`.
    """

    min_group_size = 2
    generate: Generate = field(default_factory=lambda: Generate(group_size=8))
    kl: float = 0.04
    aggregation: Aggregation = "sequence_mean"
    kl_estimator: Estimator = "k3"
    scale_by_std: bool = True
    drop_equal_groups: bool = False
    oversample: int = 1
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0

    @property
    def kl_in_reward(self) -> bool:
        return False

    def objective(self) -> ClippedPolicy:
        return replace(super().objective(), kl=self.kl, kl_estimator=self.kl_estimator)

    def shape(self) -> RewardShape:
        buffer, penalty, longest = self.overlong_buffer, self.overlong_penalty, self.generate.max_new_tokens
        return replace(super().shape(), overlong_buffer=buffer, overlong_penalty=penalty, max_tokens=longest)

    def drawn(self, prompts: int) -> int:
        return prompts * self.oversample

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        yield from at_least(self, 0, "overlong_penalty")
        yield from at_least(self, 1, "oversample")
        if self.oversample > 1 and not self.drop_equal_groups:
            yield f"oversample={self.oversample} needs drop_equal_groups=True: all groups would be trained on"
        yield from one_of(self, "kl_estimator", get_args(Estimator))
        longest = self.generate.max_new_tokens
        if not 0 <= self.overlong_buffer <= longest:
            yield f"overlong_buffer={self.overlong_buffer} must be from 0 to generate.max_new_tokens={longest}"


def grpo_advantages(options: GRPO, samples: Samples, reduce: Reduce) -> Samples:
    """Subtract the group's mean reward, and divide by its standard deviation if `scale_by_std` (arXiv 2402.03300,
    section 4.1.2). Also returns `informative`: 1 if the rewards of the group differ."""
    batch = Batch.of(samples, options)
    group_size = options.generate.group_size
    distances_PG, counts_P = batch.group_distances(batch.rewards_N)
    differs_P = distances_PG.amax(1) - distances_PG.amin(1) > _EQUAL
    differs_N = differs_P.repeat_interleave(group_size)
    if options.scale_by_std:
        variance_P = distances_PG.square().sum(1) / (counts_P - 1).clamp(min=1)
        distances_PG = distances_PG / (variance_P.sqrt() + _STD_EPSILON)[:, None]
    trained_N = differs_N if options.drop_equal_groups else None
    if options.oversample > 1:
        trained_N = _first_groups(options, samples, differs_P, reduce).repeat_interleave(group_size)
    result = batch.result(batch.spread(distances_PG.flatten()), reduce, trained_N)
    return Samples(samples.ids, {**result, "informative": per_sample(differs_N)})


def _first_groups(options: GRPO, samples: Samples, differs_P: Tensor, reduce: Reduce) -> Tensor:
    """Return which groups of this rank are among the first of all ranks' that differ, as many as are trained on."""
    group_size = options.generate.group_size
    drawn = int(reduce(torch.tensor(len(samples)))) // group_size
    numbers_P = torch.tensor(samples.ids[::group_size], dtype=torch.int64) // group_size
    differs = reduce(torch.zeros(drawn, dtype=torch.float64).index_put((numbers_P,), differs_P.double()))
    return differs_P & (differs.cumsum(0)[numbers_P] <= drawn // options.oversample)


def grpo_algorithm(options: type[GRPO]) -> Algorithm:
    """Return GRPO with the defaults, and the objective, of `options`."""

    def calls(chosen: GRPO) -> tuple[ModelCall, ...]:
        return policy_calls(chosen, partial(grpo_advantages, chosen), scalars=("informative",), grouped=True)

    # Twice the rate, or a steeper warmup, undoes supervised steps before it learns.
    return Algorithm(options, calls, learning_rate=1e-3, warmup_steps=20)


GRPO_ALGORITHM = grpo_algorithm(GRPO)

"""Algorithms on given responses: reward models and DPO from pairs, and supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from usp.fields import Rule
from usp.presets import PRETRAINED_RATE
from usp.rlhf.graph import Compute, ModelCall, Objective, Reduce, Sequences
from usp.rlhf.samples import Samples

from .algorithm import Above0, Algorithm, Options, logprobs, train
from .objectives import Metrics, NextToken, Weighting, mini_batch_numbers


@dataclass(frozen=True)
class DPO(Options):
    """Options of direct preference optimization, see `DirectPreference`."""

    beta: Above0 = 0.1
    label_smoothing: Annotated[float, Rule(lambda value: 0 <= value < 0.5, "at least 0 and below 0.5")] = 0.0


@dataclass(frozen=True)
class PreferredScore(Objective):
    """Mean over pairs of -log sigmoid(chosen score - rejected score) (Bradley-Terry; Ouyang et al., arXiv 2203.02155,
    equation 1); a score is the value at the last token.

    Metrics: accuracy, margin, chosen_score, rejected_score, means over pairs.
    """

    head = "values"
    keys: ClassVar[tuple[str, ...]] = ("weights",)
    unit = 2

    def __call__(
        self, output_BS: Tensor, entropy_BS: Tensor | None, given: Mapping[str, Tensor], sequences: Sequences
    ) -> tuple[Tensor, Metrics]:
        weights_BS = given["weights"]
        chosen_P, rejected_P = _pairs(sequences.sums(output_BS.where(weights_BS != 0, 0)))
        weights_P, _ = _pairs(sequences.sums(weights_BS))
        loss = -(weights_P * logsigmoid(chosen_P - rejected_P)).sum()
        return sequences.share(loss), _metrics(weights_P, chosen_P, rejected_P, "score", sequences)


@dataclass(frozen=True)
class DirectPreference(Objective):
    """Mean over pairs of -log sigmoid(beta * (chosen - rejected)), each the sum of log(policy / ref) over a response.

    DPO (Rafailov et al., arXiv 2305.18290, equation 7). `label_smoothing` e assumes that a preference is wrong with
    probability e: (1 - e) times this loss plus e times that of the swapped pair (conservative DPO, Mitchell, 2023).

    Metrics: accuracy, margin, chosen_reward, rejected_reward (beta times the sums), means over pairs.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    keys: ClassVar[tuple[str, ...]] = ("weights", "mask", "ref_logprobs")
    counts = "mask"
    unit = 2

    def __call__(
        self, output_BS: Tensor, entropy_BS: Tensor | None, given: Mapping[str, Tensor], sequences: Sequences
    ) -> tuple[Tensor, Metrics]:
        counts_BS = given["mask"] != 0
        log_ratio_BS = output_BS.where(counts_BS, 0) - given["ref_logprobs"].where(counts_BS, 0)
        chosen_P, rejected_P = _pairs(self.beta * sequences.sums(log_ratio_BS))
        weights_P, _ = _pairs(sequences.sums(given["weights"]))
        margin_P = chosen_P - rejected_P
        smoothing = self.label_smoothing
        loss_P = -(1 - smoothing) * logsigmoid(margin_P) - smoothing * logsigmoid(-margin_P)
        loss = sequences.share((weights_P * loss_P).sum())
        return loss, _metrics(weights_P, chosen_P, rejected_P, "reward", sequences)


def _pairs(x_B: Tensor) -> tuple[Tensor, Tensor]:
    chosen_P, rejected_P = x_B.unflatten(0, (len(x_B) // 2, 2)).unbind(1)
    return chosen_P, rejected_P


def _metrics(weights_P: Tensor, chosen_P: Tensor, rejected_P: Tensor, what: str, sequences: Sequences) -> Metrics:
    chosen_P, rejected_P = chosen_P.detach(), rejected_P.detach()
    seen = {
        "accuracy": (chosen_P > rejected_P).to(chosen_P.dtype),
        "margin": chosen_P - rejected_P,
        f"chosen_{what}": chosen_P,
        f"rejected_{what}": rejected_P,
    }
    return {name: sequences.share((weights_P * value).sum()) for name, value in seen.items()}


def pair_weights(options: Options, samples: Samples, reduce: Reduce) -> Samples:
    """Return `weights`: 1 / (pairs of the mini-batch) at each sample's last token, else 0."""
    batch = mini_batch_numbers(samples.ids, options.mini_batches, 2, reduce)
    pairs = reduce(torch.bincount(batch, minlength=options.mini_batches).double() / 2)
    weights = [torch.zeros(len(tokens)) for tokens in samples["tokens"]]
    for weight, number in zip(weights, batch.tolist(), strict=True):
        weight[-1] = 1 / pairs[number]
    return Samples(samples.ids, {"weights": weights})


def _weights(options: Options) -> ModelCall:
    work = Compute(partial(pair_weights, options), unit=2, scalars=())
    return ModelCall("weights", "", work, ("tokens",), ("weights",))


def _dpo_calls(options: DPO) -> tuple[ModelCall, ...]:
    objective = DirectPreference(options.beta, options.label_smoothing)
    return (_weights(options), logprobs("ref", "ref_logprobs"), train("actor", objective, options))


def token_weights(options: Options, samples: Samples, reduce: Reduce) -> Samples:
    """Weigh all tokens in `mask` equally."""
    weighting = Weighting("token_mean", options.mini_batches)
    return Samples(samples.ids, {"weights": weighting(samples.ids, samples["mask"], reduce)})


def _sft_calls(options: Options) -> tuple[ModelCall, ...]:
    work = Compute(partial(token_weights, options), scalars=())
    return ModelCall("weights", "", work, ("tokens", "mask"), ("weights",)), train("actor", NextToken(), options)


GIVEN_RESPONSES: Mapping[str, Algorithm] = {
    "sft": Algorithm(Options, _sft_calls, data="answers", pretrained_rate=PRETRAINED_RATE),
    "reward_model": Algorithm(
        Options,
        lambda options: (_weights(options), train("reward", PreferredScore(), options)),
        data="pairs",
        pretrained_rate=PRETRAINED_RATE,
        model_role="reward",
    ),
    "dpo": Algorithm(DPO, _dpo_calls, data="pairs"),
}

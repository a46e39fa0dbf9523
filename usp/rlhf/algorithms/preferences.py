"""Algorithms on given responses: reward models and DPO from pairs, and supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from usp.fields import NotNegative, Rule, shared_values
from usp.presets import PRETRAINED_RATE
from usp.rlhf.graph import Compute, ModelCall, Objective, Reduce, Sequences
from usp.rlhf.samples import Samples

from .algorithm import Above0, Algorithm, Options, logprobs, train
from .objectives import Given, NextToken, Result, Weighting, mini_batch_numbers

PairLoss = Literal["sigmoid", "ipo", "hinge", "simpo", "orpo"]
_BY_MEANS = ("simpo", "orpo")  # without a reference
_UNCERTAIN = 1e-6  # the odds of a text of probability 1, such as an empty one, are infinite


@dataclass(frozen=True)
class DPO(Options):
    """Options of direct preference optimization, see `DirectPreference`."""

    loss: PairLoss = "sigmoid"
    beta: Above0 = 0.1
    label_smoothing: Annotated[float, Rule(lambda value: 0 <= value < 0.5, "at least 0 and below 0.5")] = 0.0
    gamma: NotNegative = 0.0

    @property
    def unused(self) -> dict[str, str]:
        others = {"label_smoothing": "sigmoid", "gamma": "simpo"}
        return {name: f"without loss={loss}" for name, loss in others.items() if loss != self.loss}


@dataclass(frozen=True)
class PreferredScore(Objective):
    """Mean over pairs of -log sigmoid(chosen score - rejected score) (Bradley-Terry; Ouyang et al., arXiv 2203.02155,
    equation 1); a score is the value at the last token.

    Metrics: accuracy, margin, chosen_score, rejected_score, means over pairs.
    """

    head = "values"
    keys: ClassVar[tuple[str, ...]] = ("weights",)
    unit = 2

    def __call__(self, output_BS: Tensor, entropy_BS: Tensor | None, given: Given, sequences: Sequences) -> Result:
        weights_BS = given["weights"]
        chosen_P, rejected_P = _pairs(sequences.sums(output_BS.where(weights_BS != 0, 0)))
        return _mean(weights_BS, -logsigmoid(chosen_P - rejected_P), chosen_P, rejected_P, "score", sequences)


@dataclass(frozen=True)
class DirectPreference(Objective):
    """Mean over pairs of a loss of margin = beta * (chosen - rejected), each the sum of log(policy / ref) over a
    response. With simpo and orpo each is the mean of log(policy) over its tokens, without a reference.

    sigmoid: -log sigmoid(margin), DPO (Rafailov et al., arXiv 2305.18290, equation 7). `label_smoothing` e assumes that
    a preference is wrong with probability e: (1 - e) times this loss plus e times that of the swapped pair
    (conservative DPO, Mitchell, 2023). ipo: (margin / beta - 1 / (2 beta))^2 (Azar et al., arXiv 2310.12036, equation
    17). hinge: max(0, 1 - margin) (Liu et al., arXiv 2309.06657, section 3). simpo: -log sigmoid(margin - gamma)
    (Meng et al., arXiv 2405.14734, equation 6). orpo: -chosen - beta * log sigmoid(log odds of the chosen minus those
    of the rejected mean) (Hong et al., arXiv 2403.07691, equations 6 and 7).

    Metrics: accuracy, margin, chosen_reward, rejected_reward (beta times the sums or means), means over pairs.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    loss: PairLoss = "sigmoid"
    gamma: float = 0.0
    counts = "mask"
    unit = 2

    @property
    def keys(self) -> tuple[str, ...]:
        return ("weights", "mask", *(() if self.loss in _BY_MEANS else ("ref_logprobs",)))

    def __call__(self, output_BS: Tensor, entropy_BS: Tensor | None, given: Given, sequences: Sequences) -> Result:
        counts_BS = given["mask"] != 0
        log_BS = output_BS.where(counts_BS, 0)
        if self.loss in _BY_MEANS:
            sums_N = sequences.sums(log_BS) / sequences.sums(counts_BS.to(log_BS.dtype)).clamp(min=1)
        else:
            sums_N = sequences.sums(log_BS - given["ref_logprobs"].where(counts_BS, 0))
        chosen_P, rejected_P = _pairs(self.beta * sums_N)
        losses_P = self._losses(sums_N, chosen_P - rejected_P)
        return _mean(given["weights"], losses_P, chosen_P, rejected_P, "reward", sequences)

    def _losses(self, sums_N: Tensor, margin_P: Tensor) -> Tensor:
        if self.loss == "ipo":
            return (margin_P / self.beta - 1 / (2 * self.beta)).square()
        if self.loss == "hinge":
            return (1 - margin_P).clamp(min=0)
        if self.loss == "orpo":
            certain_N = sums_N.clamp(max=-_UNCERTAIN)
            better_P, worse_P = _pairs(certain_N - (-certain_N.expm1()).log())
            return -_pairs(sums_N)[0] - self.beta * logsigmoid(better_P - worse_P)
        smoothing, margin_P = self.label_smoothing, margin_P - self.gamma
        return -(1 - smoothing) * logsigmoid(margin_P) - smoothing * logsigmoid(-margin_P)


def _pairs(x_B: Tensor) -> tuple[Tensor, Tensor]:
    chosen_P, rejected_P = x_B.unflatten(0, (len(x_B) // 2, 2)).unbind(1)
    return chosen_P, rejected_P


def _mean(
    weights_BS: Tensor, loss_P: Tensor, chosen_P: Tensor, rejected_P: Tensor, what: str, sequences: Sequences
) -> Result:
    weights_P, _ = _pairs(sequences.sums(weights_BS))
    chosen_P, rejected_P = chosen_P.detach(), rejected_P.detach()
    seen = {
        "accuracy": (chosen_P > rejected_P).to(chosen_P.dtype),
        "margin": chosen_P - rejected_P,
        f"chosen_{what}": chosen_P,
        f"rejected_{what}": rejected_P,
    }
    metrics = {name: sequences.share((weights_P * value).sum()) for name, value in seen.items()}
    return sequences.share((weights_P * loss_P).sum()), metrics


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
    objective = DirectPreference(**shared_values(options, DirectPreference))
    ref = () if options.loss in _BY_MEANS else (logprobs("ref", "ref_logprobs"),)
    return (_weights(options), *ref, train("actor", objective, options))


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

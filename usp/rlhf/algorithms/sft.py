"""Supervised fine-tuning: tokens, mask -> weights -> train step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from usp.presets import PRETRAINED_RATE
from usp.rlhf.data.samples import Samples
from usp.rlhf.graph.calls import Compute, ModelCall, Reduce

from .algorithm import Algorithm, Options, train
from .loss_weights import Weighting
from .objectives import NextToken


@dataclass(frozen=True)
class SFT(Options):
    """Options of next-token training on the tokens in `mask`; a mini-batch is one optimizer step."""


def token_weights(options: SFT, samples: Samples, reduce: Reduce) -> Samples:
    """Weigh all tokens in `mask` equally."""
    weighting = Weighting("token_mean", options.mini_batches)
    return Samples(samples.ids, {"weights": weighting(samples.ids, samples["mask"], reduce)})


def _calls(options: SFT) -> tuple[ModelCall, ...]:
    work = Compute(partial(token_weights, options), scalars=())
    return ModelCall("weights", "", work, ("tokens", "mask"), ("weights",)), train("actor", NextToken(), options)


SFT_ALGORITHM = Algorithm(SFT, _calls, data="answers", pretrained_rate=PRETRAINED_RATE)

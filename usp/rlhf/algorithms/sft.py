"""Supervised fine-tuning: tokens, mask -> weights -> train step."""

from __future__ import annotations

from dataclasses import dataclass

from usp.rlhf.graph.calls import Compute, ModelCall

from .algorithm import Algorithm, Options, train
from .objectives import NextToken
from .weights import TokenWeights, Weighting


@dataclass(frozen=True)
class SFT(Options):
    """Options of next-token training on the tokens in `mask`; a mini-batch is one optimizer step."""


def _calls(options: SFT) -> tuple[ModelCall, ...]:
    weights = Compute(TokenWeights(Weighting("token_mean", options.mini_batches)), scalars=())
    return (
        ModelCall("weights", "", weights, ("tokens", "mask"), ("weights",)),
        train("actor", NextToken(), options),
    )


SFT_ALGORITHM = Algorithm(SFT, _calls, data="answers")

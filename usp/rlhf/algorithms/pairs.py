"""What train steps minimise over pairs: sample 2i was preferred to sample 2i + 1. P pairs.

A pair's loss needs whole sequences, so every sequence-parallel rank computes it from their sums and takes a share.
`weights` has 1 / pairs of the mini-batch at one token of each sample (`PairWeights`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from torch.nn.functional import logsigmoid

from usp.rlhf.graph.calls import Sequences

from .objectives import Metrics


@dataclass(frozen=True)
class PreferredScore:
    """mean over pairs of -log sigmoid(chosen score - rejected score) (Bradley-Terry; Ouyang et al., arXiv 2203.02155,
    equation 1); a score is the value at the last token.

    Metrics: accuracy, margin, chosen_score, rejected_score, means over pairs.
    """

    head: ClassVar[Literal["values"]] = "values"
    entropy: ClassVar[bool] = False
    keys: ClassVar[tuple[str, ...]] = ("weights",)
    unit: ClassVar[int] = 2
    temperature: ClassVar[float] = 1.0

    def __call__(
        self, output_BS: Tensor, entropy_BS: Tensor | None, given: Mapping[str, Tensor], sequences: Sequences
    ) -> tuple[Tensor, Metrics]:
        weights_BS = given["weights"]
        chosen_P, rejected_P = _pairs(sequences.sums(output_BS.where(weights_BS != 0, 0)))
        weights_P, _ = _pairs(sequences.sums(weights_BS))
        loss = -(weights_P * logsigmoid(chosen_P - rejected_P)).sum()
        return sequences.share(loss), _metrics(weights_P, chosen_P, rejected_P, "score", sequences)


@dataclass(frozen=True)
class DirectPreference:
    """mean over pairs of -log sigmoid(beta * (chosen - rejected)), each the sum of log(policy / ref) over a response.

    DPO (Rafailov et al., arXiv 2305.18290, equation 7). With `label_smoothing` e the preference is taken to be wrong
    with probability e: (1 - e) times that, and e times the loss of the opposite (conservative DPO, Mitchell, 2023).

    Metrics: accuracy, margin, chosen_reward, rejected_reward (beta times the sums), means over pairs.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    head: ClassVar[Literal["logprobs"]] = "logprobs"
    entropy: ClassVar[bool] = False
    keys: ClassVar[tuple[str, ...]] = ("weights", "mask", "ref_logprobs")
    unit: ClassVar[int] = 2
    temperature: ClassVar[float] = 1.0

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

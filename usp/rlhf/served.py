"""Models that an OpenAI-compatible HTTP server has: teachers and references whose weights do not change.

token ids --POST URL/completions--> prompt_logprobs, the log-probability of each of them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .environments.ready_rewards import Server, post
from .graph import Compute, DataflowGraph, Inference, ModelCall, Reduce
from .samples import Samples

HTTP = ("http://", "https://")
_PROBE = "Zwölf Boxkämpfer jagen  42 + 8 = 50;\n\tfür (x) {日本}"  # a text that tokenizers write differently
_BYTES = 256  # of a token in a reply, at most


@dataclass(frozen=True)
class Model(Server):
    """The model of a server. url: of the API, such as http://127.0.0.1:8000/v1. workers: requests at a time."""

    name: str = ""
    timeout: float = 600.0
    workers: int = 32

    def named(self) -> Model:
        """Return this model with the name that the server has for it. Raises RuntimeError without a server."""
        return replace(self, name=self.tried(lambda: post(f"{self.url}/models", None, 10)["data"][0]["id"]))

    def tokenize(self, text: str) -> list[int] | None:
        """Return the ids of a text; None if the server does not tell."""
        body = {"model": self.name, "prompt": text, "add_special_tokens": False}
        with suppress(OSError, ValueError, LookupError, TypeError):
            return [int(token) for token in post(f"{self.url.removesuffix('/v1')}/tokenize", body, 10)["tokens"]]
        return None

    def logprobs(self, tokens: Tensor) -> Tensor:
        """Return the log-probability of each next token, at temperature 1, and 0 for the last. Raises RuntimeError."""
        return self.tried(lambda: self._logprobs(tokens.tolist()))

    def _logprobs(self, ids: list[int]) -> Tensor:
        body = {"model": self.name, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        rows = post(f"{self.url}/completions", body, self.timeout, (64 + len(ids)) * _BYTES)["choices"][0][
            "prompt_logprobs"
        ]
        values = [float(row[str(token)]["logprob"]) for token, row in zip(ids[1:], rows[1:], strict=True)]
        if not all(map(math.isfinite, values)):
            raise ValueError("a log-probability is not finite")
        return torch.tensor([*values, 0.0])


@dataclass(frozen=True)
class ServedLogprobs:
    """Function of samples: the log-probabilities of the `tokens` in `mask` under `output`."""

    model: Model
    output: str

    def __call__(self, samples: Samples, reduce: Reduce) -> Samples:
        values: list[Tensor] = []
        if samples.ids:
            with ThreadPoolExecutor(self.model.workers) as pool:
                values = list(pool.map(self.model.logprobs, samples["tokens"]))
            values = [each.where(mask != 0, 0) for each, mask in zip(values, samples["mask"], strict=True)]
        return Samples(samples.ids, {self.output: values})


def with_served(graph: DataflowGraph, urls: Mapping[str, str], encode: Callable[[str], Any]) -> DataflowGraph:
    """Return the graph whose calls of the roles in `urls` ask the servers there.

    encode: of the policy's tokenizer.

    Raises ValueError for a role whose calls need more than log-probabilities at temperature 1, a server that does not
    reply, or one with another tokenizer.
    """
    for role, url in urls.items():
        calls = [call for call in graph.calls if call.role == role]
        works = [call.work for call in calls]
        if not calls or any(not isinstance(work, Inference) or work.head != "logprobs" for work in works):
            kinds = ", ".join(f"{call.name} ({call.kind})" for call in calls) or "no calls"
            raise ValueError(f"{role}={url}: a server gives log-probabilities, and the role {role} has {kinds}")
        if different := {work.temperature for work in works if isinstance(work, Inference)} - {1.0}:
            raise ValueError(
                f"{role}={url}: a server's log-probabilities are at temperature 1, not {different.pop():g}"
            )
        try:
            model = Model(url.rstrip("/")).named()
        except RuntimeError as error:
            raise ValueError(f"{role}={url}: {error}") from error
        if (ids := model.tokenize(_PROBE)) is not None and ids != list(map(int, encode(_PROBE))):
            raise ValueError(
                f"{role}={url}: {model.name} has another tokenizer than the policy: its ids are other texts"
            )
        graph = replace(graph, calls=tuple(_asking(call, model) if call in calls else call for call in graph.calls))
    return graph


def _asking(call: ModelCall, model: Model) -> ModelCall:
    (output,) = call.outputs
    return ModelCall(call.name, "", Compute(ServedLogprobs(model, output), scalars=()), call.inputs, call.outputs)

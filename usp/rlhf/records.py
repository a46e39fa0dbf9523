"""What a run writes of its steps: their records, some of their samples and those that a reward function failed for; and
the samples as one HTML page, which needs no network: filtered by step, sorted by score, tokens colored by their gap.

A token's gap is its log-probability in training less that at sampling.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jinja2 import Environment, FileSystemLoader
from torch import Tensor

from usp.data.tokenizer import Tokenizer
from usp.parallel.groups import gather_objects
from usp.rlhf.runtime.measure import LENGTHS_FILE, StepLengths
from usp.rlhf.runtime.timeline import read_lines
from usp.run.failures import UserCodeFailed
from usp.run.metrics import count
from usp.run.output import LineFile

from .algorithms.rewards import RewardFailed, ScoreWith
from .environments.episodes import Episodes
from .environments.outside import TEXT
from .environments.tool_calls import calls_of
from .graph import Compute, DataflowGraph, Generate
from .samples import Samples

SAMPLES_FILE = "samples.jsonl"
BAD_SAMPLES_FILE = "bad-samples.jsonl"
SHOWN = 2  # samples of a step written to samples.jsonl: no others are sent to the rank that writes it
SHOWN_TOKENS = 512  # of their responses, with log-probabilities
_FAINTEST = 1e-4  # gaps below have no color; those from 1 on have all of it
_NAMES = {  # of the metrics on screen
    "score": "score",
    "reward": "reward",
    "kl": "KL",
    "teacher_kl": "KL",
    "actor/loss": "loss",
    "critic/loss": "critic loss",
    "reward/loss": "loss",
    "reward/accuracy": "accuracy",
    "actor/accuracy": "accuracy",
    "actor/grad_norm": "grad norm",
    "logprob_difference_max": "rollout/train logprob diff",
    "eval/score": "eval score",
    "staleness_max": "staleness",
    "eval/pass@1": "pass@1",
}


@dataclass(frozen=True)
class RlhfRecord:
    """The record of one step: its number, its metrics, with those of an evaluation, and its seconds without that."""

    step: int
    metrics: dict[str, float]
    seconds: float

    @property
    def printed(self) -> bool:
        return "eval/score" in self.metrics

    def numbers(self) -> dict[str, float | None]:
        return {**self.metrics, "seconds": self.seconds}

    def line(self) -> str:
        shown = [f"{text} {self.metrics[name]:.4g}" for name, text in _NAMES.items() if name in self.metrics]
        shown += [f"{count(self.metrics['tokens_length'])} tokens/sample"] if "tokens_length" in self.metrics else []
        return "  ".join([*shown, f"{self.seconds:.1f} s"])


class SampleFiles:
    """The samples of a run in its folder. Every rank calls every method, in the same order.

    reward_failure: as --reward-failure.
    """

    def __init__(
        self,
        folder: Path,
        graph: DataflowGraph,
        tokenizer: Tokenizer,
        device: torch.device,
        reward_failure: str,
        warn: Callable[[str, str], None],
    ) -> None:
        self._graph, self._tokenizer, self._device = graph, tokenizer, device
        self._reward_failure, self._warn = reward_failure, warn
        names = (SAMPLES_FILE, LENGTHS_FILE, BAD_SAMPLES_FILE)
        self.files = self._samples, self._lengths, self._bad = tuple(LineFile(folder / name) for name in names)
        works = [call.work for call in graph.calls]
        self._scorers: list[ScoreWith | Episodes] = [
            *(w.function for w in works if isinstance(w, Compute) and isinstance(w.function, ScoreWith)),
            *(w.episodes for w in works if isinstance(w, Generate) and w.episodes),
        ]

    def keep(self, number: int, samples: Samples, evaluation: bool = False) -> None:
        """Write the first samples of a step, or of the evaluation after it."""
        lines = []
        for sample in samples.ids:
            values = {key: of_key[0] for key, of_key in samples.of([sample]).values.items()}
            record = {"step": number, "evaluation": evaluation, **sample_record(values, self._tokenizer, SHOWN_TOKENS)}
            lines.append(json.dumps(record, ensure_ascii=False))
        self._samples.append(number, lines)

    def keep_lengths(
        self, number: int, lengths: Mapping[str, Sequence[int]], tickets: Sequence[int] | None = None
    ) -> None:
        """Write the lengths of all samples of a step. tickets: of their prompts, if it takes those complete first."""
        line = {"step": number, **asdict(StepLengths.of_step(self._graph, lengths))}
        if tickets is not None:
            line["tickets"] = list(tickets[:: self._graph.group_size])
        self._lengths.append(number, [json.dumps(line)])

    def check_rewards(self, number: int) -> dict[str, float]:
        """Write the samples of a step that the reward function failed for, and return their number as a metric. Raises
        UserCodeFailed on every rank, if that ends the run."""
        if not self._scorers:
            return {}
        records = list[dict[str, Any]]()
        for scorer in self._scorers:  # two of them may have one list
            records += scorer.failures
            scorer.failures.clear()
        if records:  # on the rank that called the function; with escapes, as which any text can be written
            self._bad.append(number, [json.dumps({"step": number, **each}) for each in records])
        broken = [each for each in records if each["blame"] != TEXT]
        totals = torch.tensor([len(records), len(broken)], device=self._device)
        dist.all_reduce(totals)
        failed, of_code = totals.tolist()
        if failed:
            own = broken if of_code else records
            first = next(filter(None, gather_objects(str(RewardFailed(own[0])) if own else "")))
            where = f"{'the sample is' if failed == 1 else f'{failed} samples are'} in {self._bad.path}"
            if of_code and self._reward_failure == "stop":
                raise UserCodeFailed(f"{first}; {where}")
            costs = f"--reward-failure {self._reward_failure}" if self._reward_failure != "stop" else "its score is 0"
            self._warn("failures", f"step {number}: {first}; {costs}; {where}")
        return {"reward_failures": failed}


def sample_record(sample: Mapping[str, Tensor], tokenizer: Tokenizer, most_tokens: int) -> dict[str, Any]:
    """Return the JSON record of a sample, whose values `sample` holds by key, as `Samples` does.

    prompt_parts: what `prompt` lacks, the text of special tokens, and the characters of `prompt` between them. tokens:
    [text, log-probability at sampling, in training (None if it was not computed)] of the first `most_tokens` of the
    response's `response_tokens` tokens; special ones in ⟨⟩. advantage: mean over the response. turns: of an episode,
    see `turns_of`, whose tokens of the environment have no log-probabilities.
    """
    ids, cut, decode = sample["tokens"].tolist(), int(sample["prompt_length"]), tokenizer.decode
    record: dict[str, Any] = {"prompt": decode(ids[:cut]), "response": decode(ids[cut:])}
    special = {token: f"⟨{tokenizer.show([token]) or token}⟩" for token in set(ids) if not decode([token])}
    parts = [(named, list(of)) for named, of in groupby(ids[:cut], special.__contains__)]
    record["prompt_parts"] = ["".join(special[i] for i in of) if named else len(decode(of)) for named, of in parts]
    for key in ("score", "reward"):
        if key in sample:
            record[key] = float(sample[key]) if sample[key].isfinite() else None  # the reward function failed
    if "finished" in sample:
        record["finished"] = bool(sample["finished"])
    if "advantages" in sample:
        record["advantage"] = float(sample["advantages"][cut - 1 : len(ids) - 1].mean())
    if "logprobs" in sample:
        sampled = sample["logprobs"][cut - 1 : len(ids) - 1].tolist()[:most_tokens]
        trained: list[float | None] = [None] * len(sampled)
        if "old_logprobs" in sample:
            trained = sample["old_logprobs"][cut - 1 : len(ids) - 1].tolist()[:most_tokens]
        numbers = zip(ids[cut:], sampled, trained, strict=False)
        record["tokens"] = [
            [special.get(token) or decode([token]), round(at, 6), then if then is None else round(then, 6)]
            for token, at, then in numbers
        ]
        record["response_tokens"] = len(ids) - cut
    if "turns" in sample:
        owners, rewards = (sample[key][cut - 1 : len(ids) - 1].tolist() for key in ("turns", "turn_rewards"))
        record["turns"] = turns_of(ids[cut:], owners, rewards, decode)
        record["tokens"] = [
            shown if owner else [shown[0], None, None]
            for shown, owner in zip(record.get("tokens", ()), owners, strict=False)
        ]
    return record


def turns_of(
    ids: Sequence[int], owners: Sequence[int], rewards: Sequence[float], decode: Callable[[list[int]], str]
) -> list[dict[str, Any]]:
    """Return the text and the number of tokens of each turn, and of each answer of the environment between them; of the
    policy's turns also number, reward, and the names of the tools that they call.

    owners: of each token, the turn; 0 for the environment's. rewards: of each token.
    """
    turns = []
    starts = [place for place in range(len(ids)) if not place or owners[place] != owners[place - 1]]
    for begin, end in pairwise([*starts, len(ids)]):
        turn: dict[str, Any] = {"text": decode(list(ids[begin:end])), "tokens": end - begin}
        if owners[begin]:
            turn |= {"turn": owners[begin], "reward": sum(rewards[begin:end])}
            turn["calls"] = [call if isinstance(call, str) else call[0] for call in calls_of(turn["text"])]
        turns.append(turn)
    return turns


def read_samples(run: Path) -> list[dict[str, Any]]:
    """Read the samples that a run kept, in their order. Raises ValueError if the run has none, or a line is not a
    sample."""
    path = run / SAMPLES_FILE
    if not path.is_file():
        raise ValueError(f"{run} has no samples: {path} does not exist")
    expected = "a sample: expected step, prompt, response and score"
    samples = list(read_lines(path, expected, {"step", "prompt", "response", "score"}))
    if not samples:
        raise ValueError(f"{path} holds no samples")
    return samples


def sample_page(title: str, samples: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of samples as `read_samples` gives them."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["color"] = _color
    shown = [_shown(sample) for sample in samples]
    steps, sets = ([(value,) * 2 for value in sorted({each[name] for each in shown})] for name in ("step", "set"))
    legend = [sign * gap for sign in (-1, 1) for gap in (0.001, 0.01, 0.1, 1.0)]
    page = environment.get_template("sample_page.html")
    return page.render(title=title, samples=shown, legend=legend, steps=steps, sets=sets)


def _shown(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample as the page shows it. parts: the turns of an episode, otherwise one; each with a label, and the
    text, the title and the color of each token (spans)."""
    prompt, tokens = str(sample["prompt"]), sample.get("tokens") or ()
    spans, gaps = [], []
    for text, sampled, trained in tokens:
        title, color = "" if sampled is None else f"at sampling {sampled:.4f}", ""
        if trained is not None:
            gaps.append(trained - sampled)
            title, color = f"{title}, in training {trained:.4f}, gap {gaps[-1]:+.2g}", _color(gaps[-1])
        spans.append((text, title, color))
    gap = max(map(abs, gaps), default=None)
    parts, begin = [], 0
    whole = {"text": sample["response"], "tokens": len(tokens)}
    for turn in sample.get("turns") or [whole]:
        of_turn, begin = spans[begin : begin + turn["tokens"]], begin + turn["tokens"]
        label = ""
        if "turn" in turn:
            calls = f", calls {', '.join(turn['calls'])}" if turn["calls"] else ""
            label = f"turn {turn['turn']}{calls}, reward {turn['reward']:.4g}"
        elif turn is not whole:
            label = "environment"
        whole_turn = len(of_turn) == turn["tokens"] or turn is whole
        parts.append({"label": label, "text": turn["text"], "spans": of_turn if whole_turn else []})
    kind = "evaluation" if sample.get("evaluation") else "training"
    return {"prompt_parts": [len(prompt)], **sample, "set": kind, "prompt": prompt, "parts": parts, "gap": gap}


def _color(gap: float) -> str:
    """Return blue for tokens that are likelier in training, red for less likely ones, stronger for larger gaps."""
    size = abs(gap)
    strength = 0.0 if size < _FAINTEST else min(1.0, 1 - math.log10(size) / math.log10(_FAINTEST))
    return f"rgba({'40,110,220' if gap > 0 else '220,50,40'},{0.85 * strength:.2f})"

"""The samples of a run as one self-contained HTML page: filtered by step, sorted by score, tokens colored by their gap.

A token's gap is its log-probability in training less that at sampling. The page needs no network, and shows every text
as text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from torch import Tensor

SAMPLES_FILE = "samples.jsonl"
_FAINTEST = 1e-4  # gaps below have no color; those from 1 on have all of it
_LEGEND = (0.001, 0.01, 0.1, 1.0)
_SUMMARY = 80  # characters of a prompt's end that are shown before it is opened
_NUMBERS = ("score", "reward", "advantage")

_STYLE = """
:root { --line: #d5d9e0; --quiet: #5b6472; --band: #f5f7fa; --ink: #1b2330 }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); margin: 0 auto; padding: 1.5rem; max-width: 70rem }
h1 { font-size: 1.4rem; margin: 0 0 .6rem }
form { position: sticky; top: 0; background: #fff; padding: .5rem 0; border-bottom: 1px solid var(--line) }
form label { margin-right: 1.2rem } .legend span { padding: 0 .4rem }
article { border: 1px solid var(--line); border-radius: 6px; margin: 1rem 0 }
header { background: var(--band); padding: .4rem .8rem; display: flex; gap: 1.2rem; flex-wrap: wrap }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; padding: .6rem .8rem; font-size: 13px }
summary { padding: .4rem .8rem; color: var(--quiet); cursor: pointer }
.note { padding: 0 .8rem .5rem; color: var(--quiet); margin: 0 } .response { border-top: 1px solid var(--line) }
"""

_SCRIPT = """
const form = document.querySelector("form"), list = document.querySelector("main");
const articles = [...list.children];
function show() {
  const {step, set, order} = Object.fromEntries(new FormData(form));
  const sign = order === "up" ? 1 : -1;
  const shown = articles.filter(a => (!step || a.dataset.step === step) && (!set || a.dataset.set === set));
  if (order !== "run") shown.sort((a, b) => sign * (a.dataset.score - b.dataset.score));
  list.replaceChildren(...shown);
  document.querySelector("output").textContent = `${shown.length} of ${articles.length} samples`;
}
form.addEventListener("input", show);
show();
"""


def sample_record(sample: Mapping[str, Tensor], decode: Callable[[list[int]], str], most_tokens: int) -> dict[str, Any]:
    """Return what is kept of a sample, as JSON values; `sample` has its values by key, as `Samples`.

    tokens: [text, log-probability at sampling, in training (None if it was not computed)] of the first `most_tokens` of
    the response's `response_tokens` tokens; ⟨id⟩ for a token without text. advantage: mean over the response.
    """
    ids, cut = sample["tokens"].tolist(), int(sample["prompt_length"])
    score = float(sample["score"])
    record: dict[str, Any] = {"prompt": decode(ids[:cut]), "response": decode(ids[cut:])}
    record["score"] = score if math.isfinite(score) else None  # the reward function failed
    if "finished" in sample:
        record["finished"] = bool(sample["finished"])
    if "reward" in sample:
        reward = float(sample["reward"])
        record["reward"] = reward if math.isfinite(reward) else None
    if "advantages" in sample:
        record["advantage"] = float(sample["advantages"][cut - 1 : len(ids) - 1].mean())
    if "logprobs" in sample:
        sampled = sample["logprobs"][cut - 1 : len(ids) - 1].tolist()[:most_tokens]
        trained: list[float | None] = [None] * len(sampled)
        if "old_logprobs" in sample:
            trained = sample["old_logprobs"][cut - 1 : len(ids) - 1].tolist()[:most_tokens]
        numbers = zip(ids[cut:], sampled, trained, strict=False)
        record["tokens"] = [
            [decode([token]) or f"⟨{token}⟩", round(at, 6), then if then is None else round(then, 6)]
            for token, at, then in numbers
        ]
        record["response_tokens"] = len(ids) - cut
    return record


def read_samples(run: Path) -> list[dict[str, Any]]:
    """Read the samples that a run kept, in their order.

    Raises:
        ValueError: if the run has none, or a line is not a sample.
    """
    path = run / SAMPLES_FILE
    if not path.is_file():
        raise ValueError(f"{run} has no samples: {path} does not exist")
    found = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            sample = json.loads(line) if line.strip() else None
        except ValueError as error:
            if number == len(lines):  # the run was killed while writing
                break
            raise ValueError(f"{path}, line {number} is not a sample: {error}") from None
        if sample is None:
            continue
        if not isinstance(sample, dict) or not {"step", "prompt", "response", "score"} <= sample.keys():
            raise ValueError(f"{path}, line {number} is not a sample: expected step, prompt, response and score")
        found.append(sample)
    if not found:
        raise ValueError(f"{path} holds no samples")
    return found


def sample_page(title: str, samples: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of samples as `read_samples` gives them."""
    steps = sorted({sample["step"] for sample in samples})
    sets = sorted({_set_of(sample) for sample in samples})
    swatches = "".join(
        f'<span style="background:{_color(sign * gap)}">{sign * gap:+g}</span>' for sign in (-1, 1) for gap in _LEGEND
    )
    form = (
        f"<label>step {_select('step', [('', 'all'), *((str(step), str(step)) for step in steps)])}</label>"
        f"<label>of {_select('set', [('', 'all'), *((name, name) for name in sets)])}</label>"
        f"<label>order {_select('order', [('run', 'of the run'), ('down', 'highest score'), ('up', 'lowest score')])}"
        f"</label><output></output>"
        f'<div class="legend">log-probability in training less that at sampling: {swatches}</div>'
    )
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = f"<h1>{escape(title)}</h1><form>{form}</form><main>{''.join(map(_article, samples))}</main>"
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n'
        f"<body>{body}<script>{_SCRIPT}</script></body></html>\n"
    )


def _set_of(sample: Mapping[str, Any]) -> str:
    return "evaluation" if sample.get("evaluation") else "training"


def _select(name: str, choices: Sequence[tuple[str, str]]) -> str:
    options = "".join(f'<option value="{escape(value)}">{escape(text)}</option>' for value, text in choices)
    return f'<select name="{name}">{options}</select>'


def _article(sample: Mapping[str, Any]) -> str:
    numbers = "".join(
        f"<span>{name} <b>{sample[name]:.4g}</b></span>" for name in _NUMBERS if sample.get(name) is not None
    )
    prompt = str(sample["prompt"])
    response, note = _response(sample)
    unfinished = "" if sample.get("finished", True) else "<span>unfinished</span>"
    step = escape(str(sample["step"]))
    end = prompt if len(prompt) <= _SUMMARY else f"…{prompt[-_SUMMARY:]}"
    return (
        f'<article data-step="{step}" data-set="{_set_of(sample)}" data-score="{float(sample["score"] or 0)}">'
        f"<header><span>step {step}</span><span>{_set_of(sample)}</span>{numbers}{unfinished}</header>"
        f"<details><summary>prompt, {len(prompt):,} characters: {escape(end)}</summary>"
        # HTML drops a newline that begins a <pre>.
        f'<pre>\n{escape(prompt)}</pre></details><pre class="response">\n{response}</pre>{note}</article>\n'
    )


def _response(sample: Mapping[str, Any]) -> tuple[str, str]:
    """Return the response, token by token where their log-probabilities are known, and a note on them."""
    tokens = sample.get("tokens")
    if not tokens:
        return escape(str(sample["response"])), ""
    spans = [_span(*of_token) for of_token in tokens]
    gaps = [abs(trained - sampled) for _, sampled, trained in tokens if trained is not None]
    total = sample.get("response_tokens", len(tokens))
    said = f"{total:,} tokens" if total == len(tokens) else f"the first {len(tokens):,} of {total:,} tokens"
    if gaps:
        said += f", largest gap {max(gaps):.2g}"
    return "".join(spans), f'<p class="note">{said}</p>'


def _span(text: str, sampled: float, trained: float | None) -> str:
    if trained is None:
        return f'<span title="at sampling {sampled:.4f}">{escape(text)}</span>'
    title = f"at sampling {sampled:.4f}, in training {trained:.4f}, gap {trained - sampled:+.2g}"
    return f'<span style="background:{_color(trained - sampled)}" title="{title}">{escape(text)}</span>'


def _color(gap: float) -> str:
    """Return blue for tokens that are likelier in training, red for less likely ones, stronger for larger gaps."""
    size = abs(gap)
    strength = 0.0 if size < _FAINTEST else min(1.0, 1 - math.log10(size) / math.log10(_FAINTEST))
    return f"rgba({'40,110,220' if gap > 0 else '220,50,40'},{0.85 * strength:.2f})"

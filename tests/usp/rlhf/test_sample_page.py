"""The page of a run's samples shows every text as text, and each token's gap."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from usp.__main__ import main
from usp.rlhf.records import read_samples, sample_page, sample_record

EVIL = "</pre><script>alert('x')</script><img src=x onerror=alert(1)>&amp;\"'"


class Letters:
    """A tokenizer whose token 9 is special."""

    def __init__(self, texts: Sequence[str] = tuple("<&>abcdef")) -> None:
        self.texts = [*texts, *[""] * (9 - len(texts))]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join([*self.texts, ""][i] for i in ids)

    def show(self, ids: Iterable[int]) -> str:
        return "".join([*self.texts, "<b>"][i] for i in ids)


def test_a_record_has_the_tokens_of_the_response_with_both_log_probabilities() -> None:
    per_token = torch.tensor([0.0, 0.0, -0.5, -1.0, -2.0, 0.0])  # entry t is about token t + 1
    sample = {
        "tokens": torch.tensor([3, 4, 5, 0, 1, 2]),
        "prompt_length": torch.tensor(3),
        "score": torch.tensor(0.5),
        "finished": torch.tensor(False),
        "advantages": torch.tensor([0.0, 0.0, 1.0, 2.0, 6.0, 0.0]),
        "logprobs": per_token,
        "old_logprobs": per_token * 1.5,
    }
    record = sample_record(sample, Letters(), most_tokens=2)
    assert (record["prompt"], record["response"]) == ("abc", "<&>")
    assert record["tokens"] == [["<", -0.5, -0.75], ["&", -1.0, -1.5]]
    assert (record["score"], record["advantage"], record["finished"], record["response_tokens"]) == (0.5, 3.0, False, 3)
    del sample["old_logprobs"], sample["advantages"]
    bare = sample_record(sample, Letters(), most_tokens=9)
    assert bare["tokens"][2] == [">", -2.0, None] and "advantage" not in bare


def test_special_tokens_are_told_from_texts_like_them() -> None:
    sample = {"tokens": torch.tensor([9, 0, 4, 2, 9, 9, 3, 9]), "prompt_length": torch.tensor(7)}
    record = sample_record({**sample, "logprobs": torch.zeros(8)}, Letters(), most_tokens=9)
    assert record["prompt"] == "<b>a" and record["tokens"][0][0] == "⟨<b>⟩"
    page = Page(sample_page("run", [{"step": 1, "score": 0, **record}]))
    assert "⟨<b>⟩<b>⟨<b>⟩⟨<b>⟩a" in page.text.replace("\n", "")
    assert sum(each.get("class") == "special" for _, each in page.elements) == 2


def test_an_episode_has_turns_with_rewards_and_the_tools_that_they_call(tmp_path: Path) -> None:
    texts = {1: '<tool_call>{"name": "search", "arguments": {}}</tool_call>', 2: "<b>seven</b>", 3: "8", 0: "Q"}
    sample = {
        "tokens": torch.tensor([0, 1, 2, 2, 3]),
        "prompt_length": torch.tensor(1),
        "score": torch.tensor(1.5),
        "logprobs": torch.tensor([-0.5, 0.0, 0.0, -1.0, 0.0]),
        "turns": torch.tensor([1, 0, 0, 2, 0]),
        "turn_rewards": torch.tensor([0.5, 0.0, 0.0, 1.0, 0.0]),
    }
    record = sample_record(sample, Letters([texts[each] for each in range(4)]), most_tokens=3)
    assert [turn.get("reward") for turn in record["turns"]] == [0.5, None, 1.0]
    assert record["turns"][0]["calls"] == ["search"] and record["turns"][1]["tokens"] == 2
    assert record["tokens"][1] == ["<b>seven</b>", None, None]
    page = Page(sample_page("run", [{"step": 1, **record}]))
    for label in ("turn 1, calls search, reward 0.5", "environment", "turn 2, reward 1"):
        assert label in page.text
    assert page.text.count("<b>seven</b>") == 2 and [tag for tag, _ in page.elements].count("pre") == 4


class Page(HTMLParser):
    """The elements of a page, and its text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._inside = "", ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        self.text += data if self._inside not in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def test_the_command_writes_a_page_that_runs_nothing_of_its_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spread = [["<b>", -1.0, -1.0], [EVIL, -1.0, -2.5], ["x", -1.0, -0.999]]
    samples = [
        {"step": 1, "evaluation": False, "prompt": EVIL, "response": EVIL, "score": 0.25, "tokens": spread},
        {"step": 9, "evaluation": True, "prompt": "q", "response": EVIL, "score": 1.0, "finished": False},
        {"step": 9, "prompt": "of an earlier version", "response": "r", "score": 0.0},
    ]
    lines = [json.dumps(sample) for sample in samples]
    (tmp_path / "samples.jsonl").write_text("\n".join([*lines, '{"step": 10, "pro']))
    assert main(["rlhf-samples", str(tmp_path)], {}) == 0
    assert f"3 samples: {tmp_path / 'samples.html'}" in capsys.readouterr().out
    written = (tmp_path / "samples.html").read_text()
    page = Page(written)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 1 and "img" not in tags and "b" in tags and "link" not in tags
    assert not any({"src", "href", "onerror"} & attributes.keys() for _, attributes in page.elements)
    assert page.text.count(EVIL) == 3 + 1  # its prompt is in the summary as well
    articles = [attributes for tag, attributes in page.elements if tag == "article"]
    assert [(a["data-step"], a["data-set"], a["data-score"]) for a in articles] == [
        ("1", "training", "0.25"),
        ("9", "evaluation", "1.0"),
        ("9", "training", "0.0"),
    ]
    titled = [attributes for tag, attributes in page.elements if "title" in attributes]
    assert titled[1]["title"] == "at sampling -1.0000, in training -2.5000, gap -1.5"
    assert len({str(a["style"]) for a in titled}) == 3  # none, less and more likely in training


def test_what_is_no_sample_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rlhf-samples", str(tmp_path)], {}) == 1
    assert "has no samples" in capsys.readouterr().err
    (tmp_path / "samples.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="line 1 is not a sample: expected step, prompt, response and score"):
        read_samples(tmp_path)
    assert "<!doctype html>" in sample_page("", [{"step": 1, "prompt": "", "response": "", "score": 0}])

"""Built-in examples, examples from a file, and the order in which they are drawn."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from usp.data.tokenizer import ByteTokenizer
from usp.rlhf.algorithms.rewards import match
from usp.rlhf.data.datasets import MARKS, QUESTION, example_indices, open_examples

KEYS = ("prompt", "answer")


def test_built_in_examples_hide_one_mark_and_depend_only_on_seed_and_index() -> None:
    first, again = (
        open_examples("stdlib", KEYS, ByteTokenizer(), prompt_tokens=300, longest=400, seed=3) for _ in "ab"
    )
    other = open_examples("stdlib", KEYS, ByteTokenizer(), prompt_tokens=300, longest=400, seed=4)
    places, answers, lengths = set(), Counter(), []
    for index in range(40):
        example = first[index]
        assert np.array_equal(example.prompt, again[index].prompt) and example.answer == again[index].answer
        assert not np.array_equal(example.prompt, other[index].prompt)
        lengths.append(len(example.prompt))
        text = ByteTokenizer().decode(example.prompt.tolist())
        mark = MARKS[int(example.answer) - 1]
        assert text.endswith(QUESTION) and text.count(mark) == 1
        assert not any(other in text for other in MARKS if other != mark)
        assert match(text, example.answer, example.answer) == 1 and match(text, example.rejected, example.answer) == 0
        places.add(text.index(mark))
        answers[example.answer] += 1
    assert len(places) > 30 and len(answers) == len(MARKS)
    assert 64 <= min(lengths) < 80 and 280 < max(lengths) <= 300


def test_a_fraction_of_the_answers_is_wrong() -> None:
    right, some = (
        open_examples("stdlib", KEYS, ByteTokenizer(), prompt_tokens=64, longest=64, seed=3, wrong_answers=part)
        for part in (0.0, 0.3)
    )
    assert all(np.array_equal(right[index].prompt, some[index].prompt) for index in range(20))
    wrong = sum(right[index].answer != some[index].answer for index in range(400))
    assert 90 <= wrong <= 150  # 120 expected


def test_match_compares_the_whole_answer() -> None:
    assert match("", " 7\n", "7") == 1
    assert [match("", response, "7") for response in ("77", "", "8", "7 8")] == [0, 0, 0, 0]


def test_file_of_preference_pairs(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "chosen": f"yes{n}", "rejected": f"no{n}"} for n in range(3)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    keys = ("prompt", "chosen", "rejected")
    found = open_examples(str(tmp_path / "pairs.jsonl"), keys, ByteTokenizer(), prompt_tokens=1, longest=9, seed=0)
    assert len(found) == 3 and (found[2].answer, found[2].rejected) == ("yes2", "no2")
    assert ByteTokenizer().decode(found[1].prompt.tolist()) == "p1"


@pytest.mark.parametrize("answer", ["", "a"])
def test_only_the_requested_keys_are_read(tmp_path: Path, answer: str) -> None:
    (tmp_path / "row.jsonl").write_text(json.dumps({"prompt": "p", "answer": answer, "chosen": "c", "rejected": "r"}))
    wanted = {KEYS: (answer, ""), ("prompt", "chosen", "rejected"): ("c", "r"), ("prompt",): ("", "")}
    for keys, said in wanted.items():
        found = open_examples(str(tmp_path / "row.jsonl"), keys, ByteTokenizer(), prompt_tokens=1, longest=9, seed=0)
        assert (found[0].answer, found[0].rejected) == said


def test_prompt_and_answer_must_fit_the_context_together(tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "ppp", "answer": "a" * 9}))
    made = {"prompt_tokens": 1, "longest": 10, "seed": 0}
    assert len(open_examples(str(tmp_path / "long.jsonl"), KEYS, ByteTokenizer(), **made)) == 1
    with pytest.raises(
        ValueError, match=r"line 1: a prompt of 3 tokens and .* under 'answer' exceed .* context of 10:"
    ):
        open_examples(str(tmp_path / "long.jsonl"), KEYS, ByteTokenizer(), **made, whole=True)


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d"
    rows = [{"prompt": text, "answer": text}, {"prompt": "p", "answer": "a"}]
    lines = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "rows.jsonl").write_text(lines, encoding="utf-8", newline="")
    found = open_examples(str(tmp_path / "rows.jsonl"), KEYS, ByteTokenizer(), prompt_tokens=1, longest=20, seed=0)
    assert [found[n].answer for n in range(len(found))] == [text, "a"]


@pytest.mark.parametrize("size", [7, 2**30])
def test_stream_resumes_anywhere_and_every_epoch_has_each_example_once(size: int) -> None:
    whole = example_indices(0, 21, size, seed=5)
    assert whole == example_indices(0, 4, size, 5) + example_indices(4, 10, size, 5) + example_indices(14, 7, size, 5)
    assert len(set(whole[:7])) == len(set(whole[7:14])) == 7
    if size == 7:
        assert whole[:7] != whole[7:14] and whole != example_indices(0, 21, size, seed=6)

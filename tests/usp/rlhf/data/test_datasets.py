"""Built-in examples, examples from a file, and the order in which they are drawn."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import tokenizers
from pyarrow import parquet
from tokenizers import decoders, models, processors, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from usp.data.tokenizer import ByteTokenizer, Tokenizer
from usp.hf.tokenizers import load_tokenizer
from usp.rlhf.datasets import MARKS, QUESTION, Examples, example_indices, open_examples, sequences_of
from usp.rlhf.environments.ready_rewards import match

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


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.parquet"])
def test_file_of_preference_pairs(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": f"p{n}", "chosen": f"yes{n}", "rejected": f"no{n}"} for n in range(3)]
    if name.endswith("parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
    else:
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    keys = ("prompt", "chosen", "rejected")
    found = open_examples(str(tmp_path / name), keys, ByteTokenizer(), prompt_tokens=1, longest=9, seed=0)
    assert len(found) == 3 and (found[2].answer, found[2].rejected) == ("yes2", "no2")
    assert ByteTokenizer().decode(found[1].prompt.tolist()) == "p1"


def test_rows_of_parquet_are_read_and_numbered_as_lines_are(tmp_path: Path, chat: Tokenizer) -> None:
    asked = [{"role": "user", "content": "p", "name": None}]
    rows: list[dict] = [{"prompt": asked, "answer": f"a{n}", "level": {"at": n, "of": None}} for n in range(40)]
    rows = [{**row, "made": datetime(2026, 1, 2), "none": None} for row in rows]
    rows[20]["answer"], rows[30]["prompt"] = None, [{"role": "user", "content": "p" * 99}]
    data, options = tmp_path / "rows.parquet", {"prompt_tokens": 1, "longest": 30, "seed": 0}
    parquet.write_table(pyarrow.Table.from_pylist(rows), data)
    with pytest.raises(ValueError, match=r"rows\.parquet: row 21: no text under 'answer'.*; row 31: a prompt of"):
        open_examples(str(data), KEYS, chat, **options)
    found = open_examples(str(data), KEYS, chat, **options, bad_rows="drop", drop_long=True)
    assert [example.answer for example in found] == [f"a{n}" for n in range(40) if n not in (20, 30)]
    assert json.loads(found[-1].row) | {"made": ""} == {
        "prompt": [{"role": "user", "content": "p"}],
        "answer": "a39",
        "level": {"at": 39},
        "made": "",
        "none": None,
    }
    keys, long, bad = found.notes
    assert keys == "keys of 38 rows: prompt, answer read; not read: level, made"
    assert long.startswith("1 rows are too long for the context and left out; the first: row 31: a prompt of")
    assert bad.startswith("1 rows were left out by --bad-rows drop; the first: row 21: no text under 'answer'")
    lines = "\n".join(json.dumps(row, default=str) for number, row in enumerate(rows) if number not in (20, 30))
    (tmp_path / "rows.jsonl").write_text(lines)
    for ours, theirs in zip(found, open_examples(str(tmp_path / "rows.jsonl"), KEYS, chat, **options), strict=True):
        assert ours.prompt.tolist() == theirs.prompt.tolist() and ours.answer == theirs.answer
    parquet.write_table(pyarrow.Table.from_pylist(rows[20:21]), data)
    with pytest.raises(ValueError, match=r"holds no good row: row 1: no text"):
        open_examples(str(data), KEYS, chat, **options, bad_rows="drop")


def test_a_row_of_parquet_that_is_not_text_is_one_bad_row(tmp_path: Path) -> None:
    texts = pyarrow.array([b"p", b"\xff", b"p"]).view(pyarrow.string())
    data, options = tmp_path / "rows.parquet", {"prompt_tokens": 1, "longest": 9, "seed": 0}
    parquet.write_table(pyarrow.table({"prompt": texts, "answer": ["1", "2", "3"]}), data)
    with pytest.raises(ValueError, match=r"rows\.parquet: row 2: .*UTF"):
        open_examples(str(data), KEYS, ByteTokenizer(), **options)
    found = open_examples(str(data), KEYS, ByteTokenizer(), **options, bad_rows="drop")
    assert [example.answer for example in found] == ["1", "3"]
    data.write_bytes(data.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"rows\.parquet is not a Parquet file, or is damaged"):
        open_examples(str(data), KEYS, ByteTokenizer(), **options)


@pytest.mark.parametrize("answer", ["", "a"])
def test_only_the_requested_keys_are_read(tmp_path: Path, answer: str) -> None:
    (tmp_path / "row.jsonl").write_text(json.dumps({"prompt": "p", "answer": answer, "chosen": "c", "rejected": "r"}))
    wanted = {KEYS: (answer, ""), ("prompt", "chosen", "rejected"): ("c", "r"), ("prompt",): ("", "")}
    for keys, said in wanted.items():
        found = open_examples(str(tmp_path / "row.jsonl"), keys, ByteTokenizer(), prompt_tokens=1, longest=9, seed=0)
        assert (found[0].answer, found[0].rejected) == said


def test_an_optional_answer_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p"}\n{"prompt": "q", "answer": "a"}\n')
    data, options = str(tmp_path / "rows.jsonl"), {"prompt_tokens": 1, "longest": 9, "seed": 0}
    found = open_examples(data, KEYS, ByteTokenizer(), **options, optional=("answer",))
    assert [found[0].answer, found[1].answer] == ["", "a"]
    with pytest.raises(ValueError, match="line 1: no text under 'answer'"):
        open_examples(data, KEYS, ByteTokenizer(), **options)


def test_prompt_and_answer_must_fit_the_context_together(tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "ppp", "answer": "a" * 9}))
    made = {"prompt_tokens": 1, "longest": 10, "seed": 0}
    assert len(open_examples(str(tmp_path / "long.jsonl"), KEYS, ByteTokenizer(), **made)) == 1
    with pytest.raises(
        ValueError, match=r"line 1: a prompt of 3 tokens and .* under 'answer' exceed .* context of 10:"
    ):
        open_examples(str(tmp_path / "long.jsonl"), KEYS, ByteTokenizer(), **made, whole=True)


def opened(tmp_path: Path, *rows: dict, keys: tuple[str, ...] = KEYS, longest: int = 60, **options: Any) -> Examples:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = options.pop("tokenizer", ByteTokenizer())
    data = str(tmp_path / "rows.jsonl")
    return open_examples(data, keys, tokenizer, prompt_tokens=1, longest=longest, seed=0, **options)


def test_lines_that_are_too_long_can_be_dropped(tmp_path: Path) -> None:
    rows = [{"prompt": "p" * n, "answer": "a"} for n in (3, 61, 60, 99)]
    with pytest.raises(ValueError, match=r"line 2: a prompt of 61 tokens, .* long_prompts=drop.*; line 4: "):
        opened(tmp_path, *rows)
    found = opened(tmp_path, *rows, drop_long=True)
    assert [len(found[n].prompt) for n in range(len(found))] == [3, 60]
    assert found.notes[1].startswith("2 lines are too long for the context and left out; the first: line 2: a prompt")
    with pytest.raises(ValueError, match="holds no prompt of at most 2 tokens"):
        opened(tmp_path, *rows, longest=2, drop_long=True)
    with pytest.raises(ValueError, match=r"rows\.jsonl: line 5: a prompt of 0 tokens"):
        opened(tmp_path, *rows, {"prompt": "", "answer": "a"}, drop_long=True)


def test_the_keys_that_are_read_are_named(tmp_path: Path, chat: Tokenizer) -> None:
    rows: list[dict] = [
        {"prompt": "p", "answer": "a", "id": 1},
        {"question": "p", "answer": "a", "text": ""},
        {"instruction": "p", "input": "", "output": "a"},
        {"conversations": [{"from": "human", "value": "p"}, {"from": "gpt", "value": "a"}], "tools": "[]"},
    ]
    found = opened(tmp_path, *rows, *rows[:1], tokenizer=chat)
    assert found.notes == (
        "keys of 2 lines: prompt, answer read; not read: id",
        "keys of 1 lines: question, answer read; not read: text",
        "keys of 1 lines: instruction, input, output read",
        "keys of 1 lines: conversations, tools read",
    )
    assert opened(tmp_path, rows[0], keys=("prompt",)).notes == ("keys of 1 lines: prompt read; not read: answer, id",)


def test_bad_lines_can_be_dropped(tmp_path: Path) -> None:
    good, long = {"prompt": "p", "answer": "a"}, {"prompt": "p" * 99, "answer": "a"}
    bad: list[dict] = [{"prompt": 3, "answer": "a"}, {"answer": "a"}]
    found = opened(tmp_path, *bad, good, bad_rows="drop")
    assert len(found) == 1 and found.notes[1].startswith(
        "2 lines were left out by --bad-rows drop; the first: line 1: "
    )
    with pytest.raises(ValueError, match="holds no good line: line 1: a int under 'prompt'"):
        opened(tmp_path, *bad, bad_rows="drop")
    with pytest.raises(ValueError, match=r"rows\.jsonl: line 4: a prompt of 99 tokens[^;]*$"):
        opened(tmp_path, *bad, good, long, bad_rows="drop")


@pytest.mark.parametrize("name", ["part-00000", "rows.ndjson", "rows.jsonl.gz", "rows.txt"])
def test_json_lines_are_recognized_as_in_training(tmp_path: Path, name: str) -> None:
    line = json.dumps({"prompt": "p", "answer": "a"}).encode()
    (tmp_path / name).write_bytes(gzip.compress(line) if name.endswith("gz") else line)
    options: dict[str, Any] = {"prompt_tokens": 1, "longest": 9, "seed": 0}
    if name.endswith("txt"):
        with pytest.raises(ValueError, match=r"must be stdlib, or a \.jsonl or \.parquet file, or JSON lines"):
            open_examples(str(tmp_path / name), KEYS, ByteTokenizer(), **options)
    else:
        assert open_examples(str(tmp_path / name), KEYS, ByteTokenizer(), **options)[0].answer == "a"


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with a chat template that writes its BOS, as it also does before a text."""
    folder = tmp_path_factory.mktemp("tokenizer")
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator(
        [], trainers.BpeTrainer(special_tokens=["<s>", "</s>"], initial_alphabet=ByteLevel.alphabet())
    )
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    saved = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    saved.chat_template = TEMPLATE
    saved.save_pretrained(folder)
    return load_tokenizer(str(folder), parse_special=True)


def test_messages_are_prompts_by_the_chat_template(tmp_path: Path, chat: Tokenizer) -> None:
    asked = [{"role": "system", "content": "brief"}, {"role": "user", "content": "2+2?"}]
    four = {"role": "assistant", "content": "4"}
    rows = [{"prompt": asked, "answer": "4"}, {"messages": asked, "answer": [four]}, {"messages": [*asked, four]}]
    found = opened(tmp_path, *rows, tokenizer=chat)
    assert chat.bos == 0 and chat.encode("<s>").tolist() == [0]
    for n in range(3):
        text = "<s>system: brief</s>user: 2+2?</s>assistant: "
        assert found[n].prompt.tolist() == chat.encode(text).tolist() and found[n].answer == "4"
    pair = {"prompt": asked, "chosen": [four], "rejected": [{**four, "content": "5"}]}
    found = opened(tmp_path, pair, keys=("prompt", "chosen", "rejected"), tokenizer=chat)
    assert (found[0].answer, found[0].rejected) == ("4", "5")


def test_what_the_assistant_writes_is_trained_on(tmp_path: Path, chat: Tokenizer) -> None:
    """As text and targets: of messages all that the assistant writes, after a prompt only the response."""

    def trained(*rows: dict, keys: tuple[str, ...] = KEYS) -> list[list[tuple[str, str]]]:
        found = opened(tmp_path, *rows, keys=keys, tokenizer=chat, longest=200, whole=True)
        both = [sequences_of(found[n], chat, pairs="chosen" in keys) for n in range(len(found))]
        return [[(chat.show(ids), chat.show(ids[targets])) for ids, targets in one] for one in both]

    asked, four, five = (
        [{"role": "user", "content": "2+2?"}],
        *({"role": "assistant", "content": text} for text in ("4", "5")),
    )
    more = [*asked, four, {"role": "user", "content": "No!"}, five]
    begin, both = "<s>user: 2+2?</s>assistant: 4</s>", "<s>user: 2+2?</s>assistant: 4</s>user: No!</s>assistant: 5</s>"
    rows = [{"prompt": asked, "answer": "4"}, {"messages": more}, {"prompt": more[:3], "answer": [five]}]
    assert trained(*rows, {"prompt": "2+2?", "completion": "4"}) == [
        [(begin, "4</s>")],
        [(both, "4</s>5</s>")],
        [(both, "5</s>")],
        [("<s>2+2?4</s>", "4</s>")],
    ]
    pair = {"prompt": asked, "chosen": [four], "rejected": "5"}
    expected = [(begin, "4</s>"), (begin.replace("4", "5"), "5</s>")]
    assert trained(pair, keys=("prompt", "chosen", "rejected")) == [expected]
    with pytest.raises(ValueError, match=r"line 1: a prompt of 23 tokens and 2 under 'answer' exceed"):
        opened(tmp_path, rows[0], tokenizer=chat, longest=24, whole=True)


def test_an_answer_that_ends_with_the_eos_gets_no_second_one(tmp_path: Path, chat: Tokenizer) -> None:
    """As in TRL, where the tokenizer takes special tokens that are written out."""
    rows = [{"prompt": "2+2?", "answer": "4"}, {"prompt": "2+2?", "answer": "4</s>"}]
    for whole in (False, True):
        found = opened(tmp_path, *rows, tokenizer=chat, whole=whole)
        for number in range(2):
            (sequence,) = sequences_of(found[number], chat, pairs=False)
            assert chat.show(sequence[0]) == "<s>2+2?4</s>" and chat.show(sequence[0][sequence[1]]) == "4</s>"


def test_rows_of_other_names_are_prompts_with_answers(tmp_path: Path, chat: Tokenizer) -> None:
    """The same sequences as in train.py, by the chat template where there is one."""
    asked, four = [{"role": "user", "content": "2+2?"}], {"role": "assistant", "content": "4"}
    begin = "<s>user: 2+2?</s>assistant: "
    rows: list[dict] = [
        {"question": "2+2?", "answer": "4"},
        {"prompt": "2+2?", "response": "4"},
        {"instruction": "2+2?", "input": "", "output": "4"},
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        {"messages": [*asked, four], "text": "not read"},
    ]
    found = opened(tmp_path, *rows, tokenizer=chat, longest=200, whole=True)
    for number in range(len(rows)):
        (sequence,) = sequences_of(found[number], chat, pairs=False)
        shown = chat.show(found[number].prompt), chat.show(sequence[0]), chat.show(sequence[0][sequence[1]])
        assert shown == (begin, f"{begin}4</s>", "4</s>")
    system = {"messages": [*asked, {**four, "weight": 0}, *asked, four], "system": "brief"}
    found = opened(tmp_path, system, tokenizer=chat, longest=200, whole=True)
    (sequence,) = sequences_of(found[0], chat, pairs=False)
    assert (
        chat.show(sequence[0]).startswith("<s>system: brief</s>user: ")
        and chat.show(sequence[0][sequence[1]]) == "4</s>"
    )
    plain = opened(tmp_path, rows[0])
    assert ByteTokenizer().decode(plain[0].prompt.tolist()) == "2+2?\n" and plain[0].answer == "4"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": [{"role": "user", "content": "a"}]}, "chat template, which tokenizer=bytes does not have"),
        ({"prompt": ["a"]}, "a message under 'prompt' has no text under 'role': a str"),
        ({"prompt": [{"role": "user", "content": None}]}, "has neither 'content' nor .* keys role"),
        ({"messages": []}, "an empty list under 'messages', expected text or a list of messages"),
        ({"prompt": 3}, "a int under 'prompt', expected text or a list of messages"),
        ({"promt": "a"}, r"no text under 'prompt' \(did you mean 'promt'\?\)"),
        ({"prompt": "a", "answer": [{"role": "a", "content": "b"}] * 2}, "2 messages under 'answer', expected text"),
    ],
)
def test_what_is_no_prompt_is_named(tmp_path: Path, row: dict, said: str) -> None:
    with pytest.raises(ValueError, match=f"line 1: .*{said}"):
        opened(tmp_path, {"answer": "a", **row})


def test_a_template_that_refuses_messages_says_why(tmp_path: Path, chat: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"line 1: the chat template of tokenizer=.* fails for the messages: no tools"):
        opened(tmp_path, {"prompt": [{"role": "tool", "content": "a"}], "answer": "a"}, tokenizer=chat)


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

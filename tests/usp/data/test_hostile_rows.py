"""Rows from outside may hold anything and files may be damaged: every row is a document or a bad row that is counted,
and every file gives its rows or one error that names it."""

from __future__ import annotations

import bz2
import copy
import csv
import gzip
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from tests.usp.data.chat_templates import write_tokenizer
from usp.data.chats import Chat, NoText
from usp.data.documents import DROP, REFUSE, read_pieces
from usp.data.sources import DataFile, find_files
from usp.data.store import TokenStore
from usp.data.tokenizer import ByteTokenizer, Tokenizer
from usp.data.tokenizing import write_store
from usp.hf.tokenizers import load_tokenizer
from usp.rlhf.datasets import open_examples

Row = dict[str, Any]
CALL = {"type": "function", "function": {"name": "find", "arguments": {"city": "Paris", "zip": None}}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "required": ["city"]}}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Where?"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "found", "name": "find"},
    {"role": "assistant", "content": "There.", "train": True},
]
ROWS: list[Row] = [
    {"text": "a text"},
    {"messages": CHAT, "tools": [TOOL], "chat_template_kwargs": {"thinking": False}},
    {"messages": CHAT[:2] + CHAT[4:], "tools": json.dumps([TOOL]), "system": "Be brief."},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
    {"prompt": "6 x 7?", "completion": "42"},
    {"prompt": [{"role": "user", "content": "hi"}], "answer": [{"role": "assistant", "content": "ho"}]},
    {"instruction": "Add.", "input": "1 and 2", "output": "3"},
]
DEEP: Any = []
for _ in range(150):
    DEEP = [DEEP]
JUNK: list[Any] = [
    *(None, True, 0, -1, 10**40, 1e308, float("nan"), float("inf"), "", "a\0b", "\ud83d", "text \udc00", "<image>"),
    *([], {}, [[]], [{}], [None], {"\ud83d": 1}, {"role": "assistant"}, {"a": {"b": None}}, [1, "a", None], DEEP),
    *("[" * 2000, "{", "[1", "null", '{"a": "\\ud83d"}', '{"name": "f", "arguments": "{}"}', "2024-01-01", "\u2028"),
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Each container in a value with each of its keys or indices."""
    inside = list(value.items() if isinstance(value, dict) else enumerate(value))
    here = [(value, key) for key, _ in inside]
    return here + [place for _, item in inside if isinstance(item, dict | list) for place in places(item)]


def mutated(draw: random.Random, row: Row) -> Row:
    """A row with up to three places changed, removed, or given what stands at another place."""
    row = copy.deepcopy(row)
    for _ in range(draw.randrange(4)):
        if found := places(row):
            (box, key), (other, name) = draw.choice(found), draw.choice(found)
            kind = draw.randrange(8)
            if kind == 0 and isinstance(box, dict):
                del box[key]
            elif kind == 1:
                box[key] = copy.deepcopy(other[name])
            elif kind == 2 and isinstance(box, dict):
                box[draw.choice(["text", "role", "content", "tool_calls", "\ud83d", "tools"])] = copy.deepcopy(
                    draw.choice(JUNK)
                )
            else:
                box[key] = copy.deepcopy(draw.choice(JUNK))
    return row


def write_lines(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_array(path: Path, rows: list[Row]) -> None:
    path.write_text(json.dumps(rows))


def write_csv(path: Path, rows: list[Row]) -> None:
    with path.open("w", errors="replace", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0])
        for row in rows:
            writer.writerow([value if isinstance(value, str) else json.dumps(value) for value in row.values()])


def table(rows: list[Row]) -> pa.Table:
    """The rows, of which those go that do not fit in one table."""
    kept: list[Row] = []
    for row in rows:
        try:
            parquet.write_table(pa.Table.from_pylist([*kept, row]), pa.BufferOutputStream())
            kept.append(row)
        except (pa.ArrowException, ValueError, TypeError, OverflowError):  # a column of two types, half of a pair
            pass
    return pa.Table.from_pylist(kept)


def write_parquet(path: Path, rows: list[Row]) -> None:
    parquet.write_table(table(rows), path, row_group_size=7)


def write_arrow(path: Path, rows: list[Row]) -> None:
    held = table(rows)
    make = ipc.new_file if len(rows) % 2 else ipc.new_stream
    with pa.OSFile(str(path), "wb") as file, make(file, held.schema) as writer:
        writer.write_table(held, max_chunksize=20)


WRITERS: dict[str, Callable[[Path, list[Row]], None]] = {
    "a.jsonl": write_lines,
    "a.json": write_array,
    "a.csv": write_csv,
    "a.parquet": write_parquet,
    "a.arrow": write_arrow,
}


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(write_tokenizer(tmp_path_factory.mktemp("chatml"), "chatml")))


def read(path: Path, bad_rows: str = DROP) -> list[Any]:
    """The documents of a file, as they are read, and what is wrong with the rows that are none."""
    return [content for content, ends in read_pieces(DataFile.of(path), "", bad_rows) if ends]


def refusal(path: Path) -> str:
    """What is wrong with a file that is refused, which `read` must name."""
    with pytest.raises(ValueError) as caught:
        read(path, REFUSE)
    assert str(path) in str(caught.value)
    return str(caught.value)


# Rows


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.slow(but=2)
def test_every_row_is_a_document_or_a_bad_row_that_is_counted(
    tmp_path: Path, chatml: Tokenizer, name: str, exhaustive: bool
) -> None:
    draw = random.Random(name)
    for number in range(60 if exhaustive else 8):
        base = draw.choice(ROWS)
        rows = [base, *(mutated(draw, base) for _ in range(draw.randrange(20, 22)))]
        folder = tmp_path / f"{number}"
        folder.mkdir()
        WRITERS[name](folder / name, rows)
        count = table(rows).num_rows if name in ("a.parquet", "a.arrow") else len(rows)
        if name == "a.csv":  # without the rows that are blank lines
            count = sum(1 for line in csv.reader((folder / name).open(newline="")) if line) - 1
        try:
            write_store(find_files(str(folder / name)), "", chatml, folder / "store", 0, DROP)
        except ValueError as error:
            assert str(folder) in str(error) or "holds no text" in str(error), rows
            continue
        held = TokenStore(folder / "store").manifest
        assert held.documents + held.dropped == count, rows
        assert not held.dropped or str(folder) in held.why_dropped


def test_every_line_is_an_example_or_is_counted(tmp_path: Path, chatml: Tokenizer, exhaustive: bool) -> None:
    draw, path = random.Random(3), tmp_path / "a.jsonl"
    tokenizers = (chatml, ByteTokenizer())
    for number in range(100 if exhaustive else 10):
        base = ROWS[4 + number % 3] if draw.random() < 0.7 else ROWS[1 + number % 2]
        rows = [ROWS[4] | {"answer": "42"}, *(mutated(draw, base) for _ in range(20))]
        write_lines(path, rows)
        options = {"prompt_tokens": 64, "longest": 2**20, "seed": 0, "bad_rows": DROP, "whole": bool(number % 2)}
        found = open_examples(str(path), ("prompt", "answer"), tokenizers[number % 4 // 2], **options)
        left = [note for note in found.notes if "left out" in note]
        assert len(found) + sum(int(note.split()[0]) for note in left) == 21, rows


def test_halves_of_pairs_are_replaced_as_bytes_that_are_not_utf8_are(tmp_path: Path) -> None:
    whole = {"a\U0001f642": "\U0001f642 \\ud83d \ufffd"}
    for name, write in (("a.jsonl", write_lines), ("a.json", write_array)):
        write(tmp_path / name, [{"text": "cut \ud83d off", **whole}, {"text": "whole \U0001f642 \\ud83d"}])
        assert read(tmp_path / name, REFUSE) == ["cut \ufffd off", "whole \U0001f642 \\ud83d"]
    chat = [{"role": "user", "content": "\udc00"}, {"role": "assistant", "tool_calls": [{"x": {"\ud83d": ["\ud83d"]}}]}]
    write_lines(tmp_path / "chat.jsonl", [{"messages": chat, "tools": '[{"name": "\\ud83d"}]'}])
    (found,) = read(tmp_path / "chat.jsonl", REFUSE)
    assert found.messages[0]["content"] == "\ufffd" and found.tools == [{"name": "\ufffd"}]
    assert found.messages[1]["tool_calls"] == [{"x": {"\ufffd": ["\ufffd"]}}]
    row = {"prompt": "cut \ud83d", "answer": "off \udc00"}
    write_lines(tmp_path / "pairs.jsonl", [row])
    options = {"prompt_tokens": 64, "longest": 99, "seed": 0}
    (example,) = open_examples(str(tmp_path / "pairs.jsonl"), ("prompt", "answer"), ByteTokenizer(), **options)
    assert example.answer == "off \ufffd" and ByteTokenizer().decode(example.prompt.tolist()) == "cut \ufffd"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("depth", [120, 100_000])
def test_a_row_that_is_too_deep_is_one_bad_row(tmp_path: Path, name: str, depth: int) -> None:
    nested = f'{{"text": "b", "more": {"[" * depth}"]\\"["{"]" * depth}}}'
    rows = ['{"text": "a"}', nested, '{"text": "c"}', '{"text": "d", "more": [[[[[[[[1]]]]]]]]}']
    (tmp_path / name).write_text(f"[{', '.join(rows)}]" if name == "a.json" else "\n".join(rows))
    first, bad, *rest = read(tmp_path / name)
    assert [first, *rest] == ["a", "c", "d"]
    place = "object 2" if name == "a.json" else "line 2"
    assert f"{name}, {place}: " in str(bad) and "lists and objects are more than 100 deep in each other" in str(bad)
    assert refusal(tmp_path / name) == str(bad)


@pytest.mark.parametrize("name", WRITERS)
def test_rows_without_text_are_counted(tmp_path: Path, name: str) -> None:
    rows = [{"text": "a", "id": 1}, {"text": "", "id": 2}, {"text": None, "id": 3}, {"text": "b", "id": 4}]
    if name == "a.csv":
        (tmp_path / name).write_text("text,id\na,1\n,2\n,3\nb,4\n")
    else:
        WRITERS[name](tmp_path / name, rows)
    assert [type(content) for content in read(tmp_path / name, REFUSE)] == [str, NoText, NoText, str]
    write_store(find_files(str(tmp_path / name)), "text", ByteTokenizer(), tmp_path / "store")
    held = TokenStore(tmp_path / "store").manifest
    assert (held.documents, held.dropped) == (2, 2) and f"{name}, " in held.why_dropped
    assert held.why_dropped.endswith("an empty text under 'text'")


def test_arguments_of_calls_are_objects_also_where_they_are_json_text(tmp_path: Path, chatml: Tokenizer) -> None:
    arguments = {"city": "Paris", "zip": None, "near": [{"x": None}]}

    def row(given: Any) -> Row:
        call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": given}}
        return {"messages": [CHAT[1], {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [TOOL]}

    texts = [arguments, json.dumps(arguments)]
    write_lines(tmp_path / "a.jsonl", [*map(row, [*texts, {}, "", "{}", "null"]), row("Paris"), row("[1]")])
    parquet.write_table(pa.Table.from_pylist([row(json.dumps(arguments))]), tmp_path / "a.parquet")
    *chats, text, other = read(tmp_path / "a.jsonl")
    calls = [chat.messages[1]["tool_calls"][0]["function"]["arguments"] for chat in chats]
    assert calls == [arguments, arguments, {}, {}, {}, {}]
    assert chats[1].messages == chats[0].messages and "content" not in chats[0].messages[1]
    assert "line 7: 'arguments' is text, and not JSON (" in str(text)
    assert "line 8: a list as arguments of a tool call, expected an object or its JSON text" in str(other)
    assert read(tmp_path / "a.parquet")[0].messages == chats[0].messages
    ids = [chatml.chats.encode(chat)[0].tolist() for chat in chats[:2]]
    assert ids[0] == ids[1] and '"arguments": {"city": "Paris", "zip": null' in chatml.decode(ids[0])


def test_nulls_that_a_table_has_added_are_removed_from_every_format(tmp_path: Path) -> None:
    calls = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": 2}}]
    messages = [{"role": "user", "content": "?"}, *({"role": "assistant", "tool_calls": [call]} for call in calls)]
    rows = [{"messages": messages, "tools": [TOOL | {"strict": True}, TOOL]}, {"messages": CHAT[1:], "tools": [TOOL]}]
    rows[1]["messages"] = [{"role": "user", "content": "?"}, CHAT[4] | {"train": None}]
    for name, write in (("a.parquet", write_parquet), ("a.arrow", write_arrow)):
        write(tmp_path / name, rows)
    as_exported = pa.Table.from_pylist(rows).to_pylist()  # with a null for every key that another row has
    assert as_exported[0]["messages"][0]["tool_calls"] is None
    for message, call in zip(as_exported[0]["messages"][1:], calls, strict=True):
        message["tool_calls"][0]["arguments"] = call["arguments"]  # where a null is data
    write_lines(tmp_path / "a.jsonl", as_exported)
    write_array(tmp_path / "a.json", as_exported)
    del rows[1]["messages"][1]["train"]
    for path in tmp_path.iterdir():
        found = read(path)
        assert all(isinstance(chat, Chat) for chat in found), path
        assert [(chat.messages, chat.tools) for chat in found] == [(row["messages"], row["tools"]) for row in rows]


# Files


def test_an_array_that_ends_early_is_refused_with_its_place(tmp_path: Path) -> None:
    path, whole = tmp_path / "a.json", json.dumps([{"text": "a"}, {"text": "b"}])
    for text, said in (
        (whole[:-1], "it ends after object 2, without the array's ]"),
        (whole[:-1] + ",\n", "it ends after object 2, without the array's ]"),
        (whole[: whole.index(" ")], "it ends after object 0"),
        (whole[: whole.index("}") + 2], "it ends after object 1, without the array's ]"),
        ("[", "it ends after object 0, without the array's ]"),
        (whole[:-3], "object 2: not JSON ("),
        (whole + '{"text": "c"}', "more behind the end of the array, after object 2"),
        (f"{whole}]", "more behind the end of the array, after object 2"),
        ('{"text": "a"}]', "object 2: not JSON ("),
    ):
        path.write_text(text)
        if said == "it ends after object 0":
            said = "object 1: not JSON ("
        assert said in refusal(path), text
    for text in (whole, f"\n{whole}\n", whole.replace("}]", "},]"), '{"text": "a"}\n{"text": "b"}'):
        path.write_text(text)
        assert read(path, REFUSE) == ["a", "b"]


@pytest.mark.parametrize(
    "name",
    ["a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.xz", "a.jsonl.zst", "a.json", "a.csv", "a.parquet", "a.arrow", "b.arrow"],
)
def test_a_damaged_file_gives_rows_or_one_error_that_names_it(tmp_path: Path, name: str, exhaustive: bool) -> None:
    """With bytes changed, taken out, or cut off; Arrow's offsets may lead anywhere."""
    draw, path = random.Random(name), tmp_path / name
    messages = [{"messages": CHAT[3:], "text": f"text {number} " * 9, "id": number} for number in range(40)]
    rows = messages if name.startswith("b") else [{"text": row["text"], "id": row["id"]} for row in messages]
    plain = name.partition(".")[2].partition(".")[0]
    WRITERS[f"a.{plain}"](path, rows)
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    pack[".zst"] = lambda content: pa.compress(content, codec="zstd", asbytes=True)
    whole = pack.get(path.suffix, bytes)(path.read_bytes())
    failed = 0
    for _ in range(300 if exhaustive else 60):
        content = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            at, kind = draw.randrange(len(content)), draw.randrange(4)
            if kind == 0:
                content[at : at + 4] = draw.randbytes(4)
            elif kind == 1:
                content[at] ^= 1 << draw.randrange(8)
            elif kind == 2:
                content[at : at + 8] = draw.choice([0, -1, 2**31, 2**40, -(2**63)]).to_bytes(8, "little", signed=True)
            else:
                del content[at : at + draw.choice([1, 8, len(content)])]
            content = content or bytearray(b"{")
        path.write_bytes(content)
        try:
            found = read(path)
        except ValueError as error:
            assert str(path) in str(error)
            failed += 1
        else:
            assert all(str(path) in str(bad) for bad in found if isinstance(bad, ValueError))
    assert failed or plain == "csv"  # of which nearly every text is some table

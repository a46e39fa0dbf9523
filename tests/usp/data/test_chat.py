"""Chats: ids and targets by chat templates of many styles, in stores and rows, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from transformers import AutoTokenizer

from tests.usp.data.chat_templates import FAMILIES, WITH_TOOLS, WITHOUT_SYSTEM, write_tokenizer
from usp.__main__ import main
from usp.data.batches import Part, read_batch
from usp.data.cache import cached_store, find_data, open_data
from usp.data.chats import Chat, excerpt
from usp.data.rows import WholeRows
from usp.data.sources import find_files
from usp.data.store import TokenStore
from usp.data.tokenizer import ByteTokenizer
from usp.data.tokenizing import source_of, write_store
from usp.hf.tokenizers import load_tokenizer, save_tokenizer

Message = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
LINES = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}" + (
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def said(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def chats(family: str) -> list[tuple[list[Message], list[Message] | None]]:
    """Messages and tools: of one turn and of several, with what tokenizers and templates may stumble over."""
    asked, answer = said("user", "What is the answer?"), said("assistant", "the number 42 — 四十二 🎉")
    again = said("user", "\n and  why?\n"), said("assistant", "\n because the answer\n\n is a number \n")
    found: list[tuple[list[Message], list[Message] | None]] = [([asked, answer], None), ([asked, answer, *again], None)]
    if family not in WITHOUT_SYSTEM:
        found.append(([said("system", "Be brief."), asked, answer, *again, asked, answer], None))
    if family in WITH_TOOLS:
        call = said("assistant", "", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {}}}])
        found.append(([asked, call, said("tool", "42"), answer, *again], TOOLS))
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folders(family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Tokenizers with and without marks in their templates."""
    folder = tmp_path_factory.mktemp(family)
    return write_tokenizer(folder / "marked", family), write_tokenizer(folder / "plain", family, marks=False)


def test_ids_and_targets_are_those_of_transformers(family: str, folders: tuple[Path, Path]) -> None:
    """The same without marks."""
    marked, plain = (load_tokenizer(str(folder)).chats for folder in folders)
    assert marked is not None and plain is not None
    transformers = AutoTokenizer.from_pretrained(folders[0])
    for messages, tools in chats(family):
        expected = transformers.apply_chat_template(messages, tools=tools, return_assistant_tokens_mask=True)
        assert sum(expected["assistant_masks"]) > 3
        ids, mask, _ = marked.encode(Chat("here", messages, tools))
        assert ids.tolist() == expected["input_ids"] and mask.tolist() == expected["assistant_masks"]
        ids, mask, _ = plain.encode(Chat("here", messages, tools))
        if family == "phi":  # the token behind a chat ends the last message too, because nothing says otherwise
            assert mask[-1] and not expected["assistant_masks"][-1]
            mask[-2:] = False
        assert ids.tolist() == expected["input_ids"] and mask.tolist() == expected["assistant_masks"]


def test_what_is_given_is_not_trained_on_and_a_prompt_is_a_beginning(family: str, folders: tuple[Path, Path]) -> None:
    for encoder in (load_tokenizer(str(folder)).chats for folder in folders):
        assert encoder is not None
        messages = [*chats(family)[0][0], said("user", "why?"), said("assistant", "It is a number.")]
        if family != "thinking":
            every, last = encoder.encode(Chat("", messages)), encoder.encode(Chat("", messages, prompt=3))
            given = len(encoder.prompt(Chat("", messages[:3])))
            assert every[0].tolist() == last[0].tolist() and every[1][:given].any()
            assert last[1].tolist() == [target and n >= given for n, target in enumerate(every[1])]
        prompt = encoder.prompt(Chat("", messages[:3]))
        transformers = AutoTokenizer.from_pretrained(folders[0])
        expected = transformers.apply_chat_template(messages[:3], add_generation_prompt=True)
        assert prompt.tolist() == expected["input_ids"]


# Stores and rows


def conversation(number: int, length: int = 3) -> list[Message]:
    return [said("user", f"Question {number}?"), said("assistant", f"{number} " * length)]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat template for bytes, without marks."""
    file = tmp_path_factory.mktemp("template") / "lines.jinja"
    file.write_text(LINES)
    return file


def store_of(rows: list[dict[str, Any]], folder: Path, template: Path, field: str = "text") -> TokenStore:
    folder.mkdir(exist_ok=True)
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = load_tokenizer("bytes", chat_template=str(template) if template.name else "")
    return cached_store(find_files(str(folder / "data.jsonl")), field, tokenizer, folder / "cache")


def documents_of(store: TokenStore) -> list[str]:
    """The text of each document, with its targets between marks."""
    found = []
    for number in range(store.manifest.documents):
        (begin,), (end,) = store.bounds(np.array([number]))
        found.append(excerpt(store.read(begin, end), store.read_mask(begin, end), ByteTokenizer().show, color=False))
    return found


CHAT = "user: Question {0}?</s>\nassistant: ⟦{0} {0} {0} </s>⟧\n"


def test_rows_of_all_kinds_are_stored_with_their_targets(tmp_path: Path, lines: Path) -> None:
    one, two = conversation(1), [*conversation(1), *conversation(2)]
    first = CHAT.format(1)
    unmarked = first.replace("⟦", "").replace("⟧", "")
    kinds: dict[str, tuple[dict[str, Any], str]] = {
        "messages": ({"messages": one, "id": 3}, first),
        "field": ({"dialogue": one, "text": "no"}, first),
        "tools": ({"messages": one, "tools": json.dumps(TOOLS)}, first),
        "completion": ({"prompt": "1 + 1 = ", "completion": "2"}, "1 + 1 = ⟦2</s>⟧"),
        "answer": ({"prompt": "1 + 1 = ", "answer": [said("assistant", "2")]}, "1 + 1 = ⟦2</s>⟧"),
        "both": ({"prompt": two[:3], "completion": two[3:]}, unmarked + CHAT.format(2)),
        "text": ({"text": "text", "messages": one}, "⟦text</s>⟧"),
    }
    for name, (row, expected) in kinds.items():
        store = store_of([row, row], tmp_path / name, lines, field="dialogue" if name == "field" else "text")
        assert store.manifest.masked == (name != "text")
        assert documents_of(store) == [expected, expected]


def test_parquet_gives_the_chats_of_json(tmp_path: Path, lines: Path) -> None:
    rows = [{"messages": conversation(number)} for number in range(40)]
    rows[3]["messages"][0]["name"] = "a key that other messages lack"
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet", row_group_size=7)
    tokenizer = load_tokenizer("bytes", chat_template=str(lines))
    found = cached_store(find_files(str(tmp_path / "data.parquet")), "text", tokenizer, tmp_path / "cache")
    assert documents_of(found) == documents_of(store_of(rows, tmp_path, lines))


def test_a_chat_that_is_longer_than_a_row_keeps_its_beginning_and_needs_a_target_in_it(
    tmp_path: Path, lines: Path
) -> None:
    chats = [conversation(1), [*conversation(2), *conversation(3, 80)], conversation(4, 60)]
    chats.append([said("user", "a long question " * 20), said("assistant", "yes")])
    store = store_of([{"messages": messages} for messages in chats], tmp_path, lines)
    rows = WholeRows(store, 128, seed=0)
    assert (rows.long, rows.left_out, rows.per_epoch, rows.tokens) == (3, 1, 3, 2 * 128 + len(CHAT.format(1)) - 8)
    whole = [store.read(*map(int, edges)).tolist() for edges in zip(*store.bounds(np.arange(4)), strict=True)]
    batch = read_batch(rows, range(3), Part.whole(3, 128))
    found = []
    for ids, labels, (begin, end, *_) in zip(batch.input_ids, batch.shift_labels, batch.cu_seqlens, strict=True):
        document = ids[begin:end].tolist()
        found += [number for number in range(4) if whole[number][: len(document)] == document]
        targets = store.read_mask(*map(int, np.ravel(store.bounds(np.array(found[-1:])))))[1 : end + 1]
        kept = np.append(targets[: end - 1], [False] * (129 - end))
        assert labels.tolist() == np.where(kept, np.append(ids[1:], 0), -100).tolist() and kept.any()
    assert sorted(found) == [0, 1, 2]
    with pytest.raises(ValueError, match=r"no document of .* has a target in its first seq_len=16 tokens"):
        WholeRows(store, 16, seed=0)


def test_processes_write_the_chats_of_one_and_show_them(
    tmp_path: Path, lines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = store_of([{"messages": conversation(number)} for number in range(50)], tmp_path, lines)
    flags = ["tokenize", "--data", str(tmp_path / "data.jsonl"), "--tokenizer", "bytes"]
    flags += ["--output", str(tmp_path / "many"), "--processes", "2", "--chat-template", str(lines), "--show", "2"]
    assert main(flags) == 0
    assert TokenStore(tmp_path / "many").manifest == one.manifest
    assert f"document 1:\n{CHAT.format(1)}" in capsys.readouterr().out


def test_the_template_belongs_to_a_store_and_to_an_exported_tokenizer(tmp_path: Path, lines: Path) -> None:
    store_of([{"messages": conversation(1)}], tmp_path, lines)
    files, tokenizer = find_files(str(tmp_path / "data.jsonl")), load_tokenizer("bytes", chat_template=str(lines))
    write_store(files, "text", tokenizer, tmp_path / "store")
    save_tokenizer(tokenizer, tmp_path / "model")
    saved = load_tokenizer(str(tmp_path / "tokenizer"))
    found = find_data(str(tmp_path / "store"))
    assert open_data(found, "text", saved, tmp_path / "cache").manifest.masked
    (tmp_path / "other.jinja").write_text(LINES + "!")
    for other in (load_tokenizer("bytes"), load_tokenizer("bytes", chat_template=str(tmp_path / "other.jinja"))):
        with pytest.raises(ValueError, match="use the same tokenizer, chat_template, bos"):
            open_data(found, "text", other, tmp_path / "cache")
        assert source_of(files, "text", other) != source_of(files, "text", tokenizer)


# What is refused, naming file and row

GOOD = {"messages": conversation(1)}
EMPTY = "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}"
REFUSING = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + (
    "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
)
DROPPING = LINES.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else m.content[:2] }}")
ENDED = "{% if messages[-1].role == 'user' %}{{ raise_exception('no end') }}{% endif %}" + LINES
R1 = LINES.replace("assistant: {%", "assistant: <think>{%")
BAD: list[tuple[str, list[Any], str]] = [
    (LINES, [GOOD, {"mesages": []}], "line 2: no key 'messages' .did you mean 'mesages'..*rows before it have; it has"),
    (LINES, [GOOD, {"messages": "text"}], "line 2: a str under 'messages', expected text or a list of messages"),
    (LINES, [GOOD, {"messages": [{"by": "human", "value": "a"}]}], "line 2: .* no text under 'role': .* by, value"),
    (LINES, [GOOD, GOOD["messages"]], "line 2: no key 'messages', which"),
    (LINES, [GOOD, {"messages": conversation(1)[:1]}], "line 2: .* no token of these 1 messages .*: add its message"),
    (EMPTY, [GOOD], "line 1: .* no token of these 2 messages is the assistant's.*put {% generation %}"),
    (REFUSING, [GOOD, {"messages": [said("system", "a")]}], "line 2: .* fails for the messages: no system role"),
    (R1, [GOOD], "line 1: the chat template does not mark .* of message 2 it begins it with '.*<think>', but writes"),
    (DROPPING, [{"messages": conversation(1) * 2}], "line 1: .* of message 2 it writes it in another way when more"),
    (ENDED, [GOOD], "line 1: .* for the first 1 messages, which show what .* without marks: no end"),
    ("{% for", [GOOD], "line 1: the chat template of tokenizer=bytes fails for the messages: "),
    (LINES, [GOOD | {"tools": [1]}], "line 1: a list under 'tools', expected a list of JSON schemas"),
    (LINES, [{"prompt": "a", "completion": ["b"]}], "line 1: a message under 'completion' has no text under 'role'"),
    (LINES, [{"prompt": "a", "chosen": "b", "rejected": "c"}], "line 1: pairs .* are for rlhf.py: --algorithm dpo"),
    ("", [GOOD], "line 1: messages need a chat template, .* give --chat-template FILE, or for .* --data-field KEY"),
]


@pytest.mark.parametrize(("template", "rows", "message"), BAD)
def test_bad_chats_are_refused_by_file_and_row(tmp_path: Path, template: str, rows: list[Any], message: str) -> None:
    (tmp_path / "template.jinja").write_text(template)
    with pytest.raises(ValueError, match=f"data.jsonl, {message}"):
        store_of(rows, tmp_path, tmp_path / "template.jinja" if template else Path())


def test_a_half_written_file_is_refused(tmp_path: Path, lines: Path) -> None:
    half = "\n".join(map(json.dumps, [GOOD, GOOD]))[:-9]
    (tmp_path / "data.jsonl").write_text(half)
    with pytest.raises(ValueError, match=r"data\.jsonl, line 2: not JSON"):
        cached_store(
            find_files(str(tmp_path / "data.jsonl")),
            "text",
            load_tokenizer("bytes", chat_template=str(lines)),
            tmp_path / "cache",
        )

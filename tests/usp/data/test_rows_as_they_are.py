"""Rows as people have them: their keys, their roles and their parts, and ids and targets as TRL's for the same rows.

TRL is not a dependency. What it does is written out here (trl/trainer/sft_trainer.py, `_prepare_dataset`): a text
prompt with its completion is tokenized as one text with EOS, whose tokens after as many as the prompt has by itself
are targets; of messages, assistant_only_loss trains on the assistant_masks of `apply_chat_template`, which also takes
the tools and the chat_template_kwargs of the row.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from pyarrow import parquet
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import usp.data.documents
import usp.data.tokenizing
from tests.usp.data.chat_templates import write_tokenizer
from usp.__main__ import main
from usp.config import TrainConfig
from usp.data.cache import cached_store, find_data, open_data, token_lines
from usp.data.chats import Chat
from usp.data.documents import keys_of
from usp.data.sources import find_files
from usp.data.store import TokenStore
from usp.hf.tokenizers import load_tokenizer
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.train.prepare import prepare

Row = dict[str, Any]
ASKED, ANSWER = {"role": "user", "content": "What is 6 x 7?"}, {"role": "assistant", "content": "It is 42."}
AGAIN, LAST = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
ONE, TWO = [ASKED, ANSWER], [ASKED, ANSWER, AGAIN, LAST]
WORDS = "the answer of a question is a number , and the reason why is that it was always so \n\n foo  bar 42"


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("chatml"), "chatml")


@pytest.fixture(scope="module")
def unmarked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("unmarked"), "chatml", marks=False)


@pytest.fixture(scope="module", params=["prepend", "metaspace", "bytes"])
def subwords(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizers that put a space before a text, as Llama 2's (without words) and T5's do, and a byte-level one."""
    folder = tmp_path_factory.mktemp(request.param)
    bpe = tokenizers.Tokenizer(models.BPE(byte_fallback=request.param != "bytes", unk_token="<unk>"))
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    if request.param == "prepend":
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif request.param == "metaspace":
        bpe.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        bpe.pre_tokenizer, bpe.decoder, special = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
            special[:3],
        )
    words = [word for word in WORDS.split(" ") for _ in range(3)] if request.param == "prepend" else [WORDS] * 3
    bpe.train_from_iterator(words, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


def store_of(
    rows: list[Row], folder: Path, tokenizer: Path, field: str = "", bad: str = "refuse", **of: Any
) -> TokenStore:
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    files = find_files(str(folder / "rows.jsonl"), field)
    return cached_store(files, field, load_tokenizer(str(tokenizer), **of), folder / "cache", bad)


def encoded(store: TokenStore) -> list[tuple[list[int], list[bool]]]:
    """The ids and targets of each document."""
    edges = zip(*store.bounds(np.arange(store.manifest.documents)), strict=True)
    return [(store.read(*map(int, e)).tolist(), store.read_mask(*map(int, e)).tolist()) for e in edges]


def trl_messages(tokenizer: Path, messages: list[Row], tools: Any = None, **more: Any) -> tuple[list[int], list[bool]]:
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    found = loaded.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True, **more
    )
    return found["input_ids"], [target == 1 for target in found["assistant_masks"]]


def trl_pair(tokenizer: Path, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    alone, whole = loaded(prompt)["input_ids"], loaded(prompt + completion + loaded.eos_token)["input_ids"]
    return whole, [n >= len(alone) for n in range(len(whole))]


# Keys


@pytest.mark.slow
def test_messages_come_before_text_and_rows_of_all_kinds_become_chats(tmp_path: Path, chatml: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    shared = [{"from": "human", "value": ASKED["content"]}, {"from": "gpt", "value": ANSWER["content"]}]
    question, answer = ASKED["content"], ANSWER["content"]
    call = {"name": "add", "arguments": {"a": 6}}
    called, observed = {"from": "function_call", "value": json.dumps(call)}, {"from": "observation", "value": "42"}
    calling = [{"role": "user", "content": "Add."}, {"role": "assistant", "tool_calls": [{"function": call}]}]
    calling.append({"role": "tool", "content": "42"})
    more = {"role": "user", "content": f"{question}\nUse digits."}
    kinds: list[tuple[Row, list[Row]]] = [
        ({"text": "a text", "messages": ONE, "id": 7}, ONE),
        ({"conversations": shared}, ONE),
        ({"conversations": ONE, "text": "a text"}, ONE),
        ({"conversations": [{"from": "human", "value": "Add."}, called, observed, *shared]}, [*calling, *ONE]),
        ({"system": "Be brief.", "messages": ONE}, [system, *ONE]),
        ({"system": "Be brief.", "conversations": shared}, [system, *ONE]),
        ({"system": "Be brief.", "messages": [system, *ONE]}, [system, *ONE]),
        ({"question": question, "answer": answer}, ONE),
        ({"prompt": question, "response": answer, "system": "Be brief."}, [system, *ONE]),
        ({"instruction": question, "input": "", "output": answer}, ONE),
        ({"instruction": question, "input": "Use digits.", "output": answer}, [more, ANSWER]),
        ({"instruction": question, "context": "Use digits.", "response": answer}, [more, ANSWER]),
    ]
    for number, (row, messages) in enumerate(kinds):
        store = store_of([row, row], tmp_path / str(number), chatml)
        assert encoded(store) == [trl_messages(chatml, messages)] * 2, row
    named = store_of([{"q": question, "a": answer, "text": "no"}], tmp_path / "named", chatml, "q,a")
    assert encoded(named) == [trl_messages(chatml, ONE)]
    text = store_of([{"text": "a text", "messages": ONE}], tmp_path / "text", chatml, "text")
    assert not text.manifest.masked and text.manifest.characters == len("a text")


def test_rows_of_questions_need_no_chat_template(tmp_path: Path, subwords: Path) -> None:
    store = store_of([{"question": "why ?", "answer": "42"}], tmp_path, subwords)
    assert encoded(store) == [trl_pair(subwords, "why ?\n", "42")]


def test_the_first_lines_name_the_keys_that_are_read_and_those_that_are_not(
    tmp_path: Path, chatml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a", "messages": ONE, "tools": None, "id": 3}))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "<|im_start|>user", "title": "b"}))
    assert keys_of(find_files(str(tmp_path / "a.jsonl")).files, "") == [
        "keys of 1 files: messages, tools read; not read: text, id"
    ]
    flags = ["tokenize", "--tokenizer", str(chatml), "--data", str(tmp_path / "b.jsonl")]
    assert main([*flags, "--output", str(tmp_path / "store")]) == 0
    shown = capsys.readouterr().out
    assert "keys of 1 files: text read; not read: title" in shown
    assert "written out, <|im_start|>, remain text: give --parse-special-tokens" in shown
    parsed = load_tokenizer(str(chatml), parse_special=True)
    files = find_files(str(tmp_path / "b.jsonl"))
    assert not list(token_lines(cached_store(files, "", parsed, tmp_path / "cache"), parsed))


def test_messages_in_a_later_row_are_not_overlooked(tmp_path: Path, chatml: Path) -> None:
    with pytest.raises(ValueError, match="line 2: 'messages' beside 'text', which the rows before it lack"):
        store_of([{"text": "a"}, {"text": "b", "messages": ONE}], tmp_path, chatml)


# Messages


@pytest.mark.parametrize("marks", [True, False])
def test_messages_say_whether_they_are_trained_on(tmp_path: Path, chatml: Path, unmarked: Path, marks: bool) -> None:
    tokenizer, loaded = (chatml, unmarked)[not marks], load_tokenizer(str(chatml))
    rows: list[tuple[Row, list[str]]] = [
        ({"messages": [ASKED, {**ANSWER, "weight": 0}, AGAIN, LAST]}, ["Because.<|im_end|>"]),
        ({"messages": [ASKED, {**ANSWER, "weight": 1}, AGAIN, {**LAST, "train": False}]}, ["It is 42.<|im_end|>"]),
        (
            {"messages": [ASKED, ANSWER, {**AGAIN, "train": True}, LAST]},
            ["It is 42.<|im_end|>", "Why?<|im_end|>", "Because.<|im_end|>"],
        ),
    ]
    found = encoded(store_of([row for row, _ in rows], tmp_path / "rows", tokenizer))
    for (ids, targets), (_, expected) in zip(found, rows, strict=True):
        assert ids == trl_messages(chatml, TWO)[0] and runs(ids, targets, loaded) == expected
    for train_on, expected in (
        ("last", ["Because.<|im_end|>"]),
        ("user", ["What is 6 x 7?<|im_end|>", "Why?<|im_end|>"]),
    ):
        store = store_of([{"messages": TWO}], tmp_path / train_on, tokenizer, train_on=train_on)
        assert runs(*encoded(store)[0], loaded) == expected
        with pytest.raises(ValueError, match="use the same tokenizer, chat_template"):
            open_data(find_data(str(store.folder)), "", load_tokenizer(str(tokenizer)), tmp_path / "cache")


def runs(ids: list[int], targets: list[bool], tokenizer: Any) -> list[str]:
    """The texts of the runs of targets."""
    parts = np.split(np.array(ids), np.flatnonzero(np.diff(targets)) + 1)
    return [tokenizer.show(part) for part in parts[0 if targets[0] else 1 :: 2]]


def test_parts_of_text_are_one_text_for_a_template_without_parts(tmp_path: Path, chatml: Path) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "6 x 7?"}]
    listed = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": "It is 42."}]},
    ]
    assert encoded(store_of([{"messages": listed}], tmp_path / "text", chatml)) == [trl_messages(chatml, ONE)]
    image = [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}, ANSWER]
    with pytest.raises(ValueError, match=r"line 1: 1 images, which only train\.py reads"):
        store_of([{"messages": image}], tmp_path / "image", chatml)
    template = "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}" + (
        "{% for p in m.content %}<{{ p.type }}>{{ p.text }}{% endfor %}{% endif %}"
        "{% generation %}{{ eos_token }}{% endgeneration %}{% endfor %}"
    )
    (tmp_path / "parts.jinja").write_text(template)
    taking = load_tokenizer(str(chatml), chat_template=str(tmp_path / "parts.jinja"))
    ids, _, _ = taking.chats.encode(Chat("", listed))
    assert taking.show(ids).startswith("user:<text>What is <text>6 x 7?")


def test_arguments_of_the_template_and_tools_are_those_of_the_row(tmp_path: Path, chatml: Path) -> None:
    template = AutoTokenizer.from_pretrained(chatml).chat_template
    (tmp_path / "named.jinja").write_text("{{ name | default('nobody') }}" + template)
    given: list[Any] = [{"name": "Ada"}, json.dumps({"name": "Ada"}), None]
    rows = [{"messages": ONE, "chat_template_kwargs": arguments} for arguments in given]
    store = store_of(rows, tmp_path / "rows", chatml, chat_template=str(tmp_path / "named.jinja"))
    named = (tmp_path / "named.jinja").read_text()
    expected = [
        trl_messages(chatml, ONE, chat_template=named, **more) for more in ({"name": "Ada"}, {"name": "Ada"}, {})
    ]
    assert encoded(store) == expected and expected[0] != expected[2]


BAD: list[tuple[Row, str]] = [
    ({"messages": [ASKED, {**ANSWER, "weight": 0.5}]}, "a message with 'weight': 0.5, which must be"),
    (
        {"messages": [ASKED, {**ANSWER, "weight": 0}]},
        "by train_on=assistant, and by the 'train' and 'weight' of these 2",
    ),
    ({"messages": ONE, "chat_template_kwargs": {"tools": []}}, "an object with the keys tools under 'chat_template_kw"),
    (
        {"messages": [{"role": "system", "content": "a"}, *ONE], "system": "b"},
        "a system message under 'system', and an",
    ),
    ({"messages": "not a list"}, "a str under 'messages'"),
]


def test_bad_rows_are_refused_or_dropped_and_counted(
    tmp_path: Path, chatml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (row, message) in enumerate(BAD):
        with pytest.raises(ValueError, match=f"rows.jsonl, line 2: {message}"):
            store_of([{"messages": ONE}, row], tmp_path / str(number), chatml)
    rows: list[Any] = ["not JSON", {"no": 1}, {"messages": ONE}, *(row for row, _ in BAD), "[", {"messages": TWO}, "{"]
    store = store_of(rows, tmp_path / "rows", chatml, bad="drop")
    assert encoded(store) == [trl_messages(chatml, ONE), trl_messages(chatml, TWO)]
    assert store.manifest.dropped == 9 and "line 1: not JSON" in store.manifest.why_dropped
    flags = ["tokenize", "--data", str(tmp_path / "rows" / "rows.jsonl"), "--tokenizer", str(chatml)]
    assert main([*flags, "--output", str(tmp_path / "store"), "--bad-rows", "drop", "--processes", "2"]) == 0
    assert "9 rows were left out; the first: " in capsys.readouterr().out
    with pytest.raises(ValueError, match="the data holds no text in any good row"):
        store_of(["not JSON", {"messages": 3}], tmp_path / "none", chatml, bad="drop")


def test_train_reads_rows_as_its_flags_say(tmp_path: Path, chatml: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'messages': TWO, 'id': 1})}\n{{\n")
    flags: Any = {"tokenizer": str(chatml), "data_cache": str(tmp_path / "cache"), "device": "cpu", "seq_len": 128}
    config = TrainConfig(data=str(tmp_path / "rows.jsonl"), train_on="last", bad_rows="drop", **flags)
    stage = prepare(config, Launch()).begins_in
    (source,) = stage.batches.packed.sources
    assert runs(*encoded(source.store)[0], load_tokenizer(str(chatml))) == ["Because.<|im_end|>"]
    assert source.store.manifest.dropped == 1 and stage.left_out == ("keys of 1 files: messages read; not read: id",)
    stored = replace(config, data=str(source.store.folder))
    with pytest.raises(ConfigurationError, match="--bad-rows drop is for files of documents, and --data has none"):
        prepare(stored, Launch())
    assert prepare(replace(stored, bad_rows="refuse"), Launch())


# Columns of Parquet


def test_text_in_dictionaries_and_views_is_text(tmp_path: Path) -> None:
    texts = ["one", "two", "one"]
    columns = {"dictionary": pa.array(texts).dictionary_encode(), "view": pa.array(texts, pa.string_view())}
    for name, column in columns.items():
        parquet.write_table(pa.table({"text": column}), tmp_path / f"{name}.parquet")
        with (
            pa.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as file,
            pa.ipc.new_file(file, pa.schema({"text": column.type})) as out,
        ):
            out.write_table(pa.table({"text": column}))
        for suffix in ("parquet", "arrow"):
            files = find_files(str(tmp_path / f"{name}.{suffix}")).files
            assert [text for text, _ in usp.data.documents.read_pieces(files[0], "")] == texts


# Tokenizers that put a space before a text


@pytest.mark.slow
def test_prompts_and_completions_are_one_text_as_in_trl(tmp_path: Path, subwords: Path) -> None:
    pairs = [
        (prompt, completion)
        for prompt in ("the question : why ?\n", "what is the answer ?\n\n", "number", "### reason:\n", "ü 语言:\n")
        for completion in ("the answer", " a number", "42", "because it was", "\u00fc 语言 🎉")
    ]
    found = encoded(store_of([{"prompt": p, "completion": c} for p, c in pairs], tmp_path, subwords))
    for (prompt, completion), (ids, targets) in zip(pairs, found, strict=True):
        expected, mask = trl_pair(subwords, prompt, completion)
        assert ids == expected
        alone = AutoTokenizer.from_pretrained(subwords)(prompt)["input_ids"]
        if expected[: len(alone)] == alone:
            assert targets == mask
        else:  # TRL warns, and leaves out what the first token of the completion shares with the prompt
            assert np.all(np.array(targets) >= mask) and sum(targets) - sum(mask) <= 2


def test_a_long_text_has_the_ids_of_the_whole(tmp_path: Path, subwords: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usp.data.documents, "PIECE", 40)
    monkeypatch.setattr(usp.data.tokenizing, "BATCH_CHARACTERS", 200)
    draw = np.random.default_rng(0)
    words = [*WORDS.split(" "), "\n", "\n\n", " ", "ü", "语言", "🎉", "x" * 90]
    texts = [
        " ".join(draw.choice(words, 300)),
        "".join(draw.choice(words, 300)),
        "short",
        "\n".join(draw.choice(words, 99)),
    ]
    store = store_of([{"text": text} for text in texts], tmp_path, subwords)
    whole = AutoTokenizer.from_pretrained(subwords)
    assert [ids for ids, _ in encoded(store)] == [[*whole(text)["input_ids"], whole.eos_token_id] for text in texts]

"""Checks chat templates of releases, which others own and which are therefore not part of the tests:

    python -m tests.usp.data.check_templates FOLDER [NAME]

FOLDER holds files *.jinja, at any depth, such as the chat templates of TRL's wheel (`pip download --no-deps trl`) and
`vendor/llama.cpp/models/templates` of llama-cpp-python's sdist; NAME is part of the names of those to check. Each gets
a byte-level tokenizer that has its special tokens, and the stop tokens of its family, as far as these are known.
Checked are, of the chats of `conversations`:

- turns: each answer that is trained on has a stop token among its targets or is counted as one without, and nothing
  that anybody else says is a target
- continuations: what `ChatTemplate.between` puts between two answers is the template's text of the whole chat, whatever
  prefix of the ending of the first one the policy has written
- guarded: special tokens in an observation are never control tokens
- calls: arguments that are JSON text are rendered as objects are

What breaks one of these is printed, and exits with 1. A row counts them; reasons stand below."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import UndefinedError

from tests.usp.data.chat_templates import Message, said, tokenizer_of
from usp.data.chats import Chat, chat_of, messages_of
from usp.data.tokenizer import TextTokenizer, unended
from usp.hf.tokenizers import ChatTemplate

# What a template contains, and BOS, EOS and stop tokens of such models; the first that fits. "": none is known.
FAMILIES = (
    ("<|turn>", "<bos>", "<eos>", "<eos> <turn|> <|tool_response>"),  # Gemma 4
    ("<start_of_turn>", "<bos>", "<eos>", "<eos> <end_of_turn>"),
    ("<|start|>assistant<|channel|>", "<|startoftext|>", "<|return|>", "<|return|> <|call|> <|endoftext|>"),  # gpt-oss
    ("[gMASK]", None, "<|endoftext|>", "<|endoftext|> <|user|> <|observation|>"),  # GLM
    ("<|START_OF_TURN_TOKEN|>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    ("<|eom_id|>", "<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|> <|eom_id|> <|eot_id|>"),
    ("<|eot_id|>", "<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|> <|eot_id|>"),
    ("<end_of_utterance>", "<|im_start|>", "<end_of_utterance>", "<end_of_utterance>"),
    ("<｜hy_", "<｜hy_begin_of_sentence:opensource｜>", "<｜hy_eos:opensource｜>", "<｜hy_eos:opensource｜>"),
    ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    ("<|im_middle|>", "[BOS]", "[EOS]", "<|im_end|>"),  # Kimi K2
    ("<|end_of_msg|>", "[BOS]", "[EOS]", "<|end_of_msg|> [EOS]"),  # Kimi K3
    ("<end_of_sentence>", None, "<end_of_sentence>", "<end_of_sentence>"),  # MiniMax M1
    ("[e~[", "]~!b[", "[e~[", "[e~["),
    ("<|end_of_role|>", "<|end_of_text|>", "<|end_of_text|>", "<|end_of_text|>"),  # Granite
    ("<|assistant_start|>", "<s>", "</s>", "</s> <|assistant_end|> <|tools_suffix|>"),  # Apertus
    ("<|begin_assistant|>", "<s>", "<|end|>", "<|end|>"),  # Apriel 1.6
    ("<|content|>", "<s>", "<|end|>", "<|end|> <|calls|> <|flush|>"),  # Apriel 1.5, Solar
    ("<|end|>", "<s>", "<|endoftext|>", "<|endoftext|> <|end|> <|assistant|>"),  # Phi 3
    ("<|tool_calls|>", "<s>", "<|end|>", "<|end|> <|calls|> <|flush|>"),
    ("<seed:", "<seed:bos>", "<seed:eos>", "<seed:eos>"),
    ("<|message_sep|>", "<s>", "</s>", "</s> <|message_sep|>"),  # GigaChat
    ("<|role_end|>", None, "<|role_end|>", "<|role_end|> <|endoftext|>"),  # Ling
    ("〈|EOS|〉", "〈|EOS|〉", "〈|EOS|〉", "〈|EOS|〉 </assistant>"),  # Laguna
    ("<SPECIAL_1", "<s>", "<SPECIAL_12>", "<SPECIAL_12>"),  # Nemotron Nano 2
    ("<|eot|>", "<|begin_of_text|>", "<|end_of_text|>", "<|end_of_text|> <|eom|> <|eot|>"),  # Muse
    ("<sep>", "<|endoftext|>", "<|endoftext|>", "<|endoftext|> <sep>"),  # Reka
    ("[INST]", "<s>", "</s>", "</s>"),
    ("<|im_end|>", "<s>", "<|im_end|>", "<|im_end|> <|endoftext|>"),
    ("", "<s>", "<|endoftext|>", "<|endoftext|>"),
)
# What is a special token in a template: control tokens in the forms of releases, but no tags of XML.
SPECIAL = re.compile(
    r"""<\|[^|<>'"\s{}]{1,40}\|>|<\|(?:["]|[a-z_]+)>|<[a-z_"]+\|>|<｜[^｜<>{}'"]{1,40}｜>|\[/?[A-Z_]{3,}\]"""
    r"""|\[gMASK\]|<sop>|〈\|[A-Z]+\|〉|</?(?:system|user|assistant|role)>(?=['"])|<SPECIAL_1\d>|\]~!?b\[?|\[e~\["""
    r"""|<(?:start|end)_of_[a-z]+>|<(?:beginning|end)_of_sentence>|<seed:[a-z]+>|<｜hy_[A-Z][a-z]+"""
)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds numbers",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "a number"}},
            "required": ["x"],
        },
    },
}


def asked(number: int) -> Message:
    return said("user", f"question{number} is what?")


def answered(number: int, **more: Any) -> Message:
    return said("assistant", f"The answer{number} is 42.", **more)


def calling(*numbers: int, content: str = "", **more: Any) -> Message:
    calls = [
        {"type": "function", "id": f"callnum{n:02}", "function": {"name": "add", "arguments": {"x": f"value{n}"}}}
        for n in numbers
    ]
    return said("assistant", content, tool_calls=calls, **more)


def result(number: int) -> Message:
    return said("tool", f"result{number} of it", name="add", tool_call_id=f"callnum{number:02}")


def conversations(always: bool = False) -> dict[str, Chat]:
    """Chats in which no text of a message occurs in another one. always: all have tools, which some templates need."""
    tools = {"tools": [TOOL]}
    rows: dict[str, tuple[list[Message], dict[str, Any]]] = {
        "one": ([asked(1), answered(1)], {}),
        "three": ([asked(1), answered(1), asked(2), answered(2), asked(3), answered(3)], {}),
        "system": ([said("system", "Be brief."), asked(1), answered(1), asked(2), answered(2)], {}),
        "empty": ([asked(1), said("assistant", ""), asked(2), answered(2)], {}),
        "reasoning": (
            [asked(n // 2) if n % 2 == 0 else answered(n // 2, reasoning_content=f"Thought{n}.") for n in range(2, 6)],
            {},
        ),
        "tools": ([asked(1), calling(1), result(1), answered(1), asked(2), answered(2)], tools),
        "beside": (
            [
                asked(1),
                calling(1, content="Let me1 see.", reasoning_content="Thought1."),
                result(1),
                calling(2),
                result(2),
                answered(1),
            ],
            tools,
        ),
        "parallel": ([asked(1), calling(1, 2), result(1), result(2), answered(1)], {}),
        "null": ([asked(1), {**calling(1), "content": None}, result(1), answered(1)], tools),
        "call": ([asked(1), calling(1)], tools),
        "unicode": (
            [
                said("user", "四十二🎉?"),
                said("assistant", "é四"),
                said("user", "十é!"),
                said("assistant", "🎉二 wow é"),
            ],
            {},
        ),
        "stripped": (
            [asked(1), said("assistant", "\n The answer1\n\n is é \n"), said("user", "\n and why2?\n"), answered(2)],
            {},
        ),
        "fast": (
            [asked(1), answered(1), asked(2), answered(2)],
            {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
        ),
    }
    for _, more in rows.values():
        more["chat_template_kwargs"] = {**more.get("chat_template_kwargs", {}), "functions": "[]", "datetime": "today"}
        more.update({"tools": [TOOL]} if always else {})
    return {
        name: chat_of(more, messages_of(messages, "messages", name), name) for name, (messages, more) in rows.items()
    }


@dataclass
class Row:
    """What was found of one template. Counters: reasons."""

    name: str
    kept: int = 0
    stopped: int = 0
    warned: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    equal: int = 0
    differ: list[str] = field(default_factory=list)
    not_continued: Counter[str] = field(default_factory=Counter)
    not_compared: Counter[str] = field(default_factory=Counter)
    guarded: int = 0
    calls: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    def numbers(self) -> list[int]:
        reasons = [sum(counter.values()) for counter in (self.not_continued, self.not_compared)]
        counts = [self.kept, self.stopped, self.warned, sum(self.refused.values()), self.equal, len(self.differ)]
        return [*counts, *reasons, self.guarded, self.calls, len(self.errors)]


COLUMNS = ("kept", "stop", "warned", "refused", "equal", "differ", "not-continued", "not-compared", "guarded", "calls")
COLUMNS += ("errors",)


def release(path: Path) -> tuple[ChatTemplate, list[str]]:
    """Return the template in a file with a tokenizer for it, and its control tokens."""
    text = path.read_text("utf-8")
    _, bos, eos, stops = next(family for family in FAMILIES if family[0] in text)
    found = set(SPECIAL.findall(text.replace("{}", ":opensource"))) | set(stops.split())
    tokenizer = tokenizer_of(text, bos, eos, sorted(found - {bos, eos}))
    ids = tokenizer.convert_tokens_to_ids(stops.split())
    return ChatTemplate(tokenizer, path.stem, stops=tuple(sorted(ids))), sorted({*found, bos or eos, eos})


def reason(error: ValueError) -> str:
    """Return what a message says, without the place and what differs between chats."""
    text = str(error).partition(": ")[2]
    text = re.sub(r"(the )?chat template of tokenizer=\S+ fails for the[^:]*: ", "the template fails: ", text)
    text = re.sub(r" it (begins it with|writes).*", r" it \1 ...", text, flags=re.S)
    return " ".join(re.sub(r"\d+|'[^']*'", "_", text).split())[:110]


def texts_of(message: Message) -> list[str]:
    """Return texts that a template writes of a message, if it writes the message: those that no other one has."""
    values = [call["function"]["arguments"]["x"] for call in message.get("tool_calls", ())]
    content = (message["content"] or "").strip()
    return values or ([content] if content else [])  # some templates leave out a content beside calls


def check_turns(row: Row, chats: ChatTemplate, chat: Chat) -> None:
    """Count the answers that are trained on, and check what is a target."""
    wrapped = TextTokenizer("", 400, chats.tokenizer, None, None, True, chats=chats)
    try:
        ids, mask, _ = chats.encode(chat)
    except ValueError as error:
        row.refused[reason(error)] += 1
        return
    runs = np.split(ids, np.flatnonzero(np.diff(mask)) + 1)
    targets = runs[0 if mask[0] else 1 :: 2]
    stopped = sum(bool({*run.tolist()} & {*chats.stops}) for run in targets)
    warned = unended(wrapped, ids, mask)
    row.kept, row.stopped, row.warned = row.kept + len(targets), row.stopped + stopped, row.warned + warned
    if len(targets) != stopped + warned:
        row.errors.append(f"{chat.where}: {len(targets)} turns, {stopped} with a stop token, {warned} warned of")
    trained, written = "".join(map(chats.tokenizer.decode, targets)), chats.tokenizer.decode(ids)
    for message in chat.messages:
        for text in texts_of(message):
            if message["role"] == "user" and text not in written:
                row.errors.append(f"{chat.where}: {text!r} of the user is not written")
            if message["role"] != "assistant" and text in trained:
                row.errors.append(f"{chat.where}: {text!r} of the {message['role']} is a target")
            if message["role"] == "assistant" and text in written and text not in trained:
                row.errors.append(f"{chat.where}: {text!r} of the assistant is no target")
    answers = sum(message["role"] == "assistant" for message in chat.messages)
    if answers != len(targets):
        row.notes[f"{chat.where}: {answers} answers in {len(targets)} runs of targets"] += 1


def check_calls(row: Row, chats: ChatTemplate, chat: Chat) -> None:
    """Check that arguments as JSON text are encoded as objects are."""
    as_text = [dict(message) for message in chat.messages]
    for message in as_text:
        for calls in [message.get("tool_calls")] if "tool_calls" in message else ():
            functions = [call["function"] for call in calls]
            functions = [{**each, "arguments": json.dumps(each["arguments"])} for each in functions]
            message["tool_calls"] = [call | {"function": each} for call, each in zip(calls, functions, strict=True)]
    if as_text == chat.messages:
        return
    found = []
    for messages in (chat.messages, messages_of(as_text, "messages", chat.where)):
        try:
            found.append(chats.encode(replace(chat, messages=messages))[0].tolist())
        except ValueError as error:
            found.append(reason(error))
    if found[0] != found[1]:
        row.errors.append(f"{chat.where}: arguments as JSON text are rendered otherwise than as objects")
    row.calls += not isinstance(found[0], str)


def rendered(chats: ChatTemplate, chat: Chat, number: int) -> str:
    """Return what transformers writes of the first messages of a chat, up to where the next answer begins, in the form
    that the template takes: contents as texts or parts, arguments as objects or texts."""
    arguments = {"tokenize": False, "add_generation_prompt": True, **chat.template}
    messages = copy.deepcopy(chat.messages[:number])
    for message in messages if chats.takes_only_parts else ():
        message["content"] = [{"type": "text", "text": message["content"]}]
    while True:
        before = copy.deepcopy(messages)
        try:
            return str(chats.tokenizer.apply_chat_template(messages, tools=chat.tools, **arguments))
        except UndefinedError:
            for message in messages:
                message["content"] = message.get("content") or ""
            if messages == before:
                raise
        except TypeError:
            for function in [call["function"] for message in messages for call in message.get("tool_calls", ())]:
                if isinstance(function["arguments"], str):
                    raise
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            if messages == before:
                raise


def ending(chats: ChatTemplate, whole: str, prompt: str, message: Message, until: str) -> tuple[int, int] | str:
    """Return where what a template writes after an answer begins, and where its stop token ends, if it has one; or why
    that cannot be said. prompt: what it writes up to the answer. until: a text of what follows the answer."""
    texts = texts_of(message)
    if any(text not in whole for text in texts):
        return "the template does not write the answer"
    if not texts and not whole.startswith(prompt):
        return "an empty answer, whose place is not seen"
    seen = not message.get("tool_calls") and bool(texts)  # where the answer ends: a call is closed by the policy
    begin = max((whole.rindex(text) + len(text) for text in texts), default=len(prompt))
    content = message["content"] or ""
    blanks = content[len(content.rstrip()) :]
    begin += len(blanks) if whole.startswith(blanks, begin) else 0
    following = whole[begin : whole.index(until, begin)] if until in whole[begin:] else ""
    if not following:
        return "the template writes what follows the answer before it, or not at all"
    stops = [following.index(stop) + len(stop) for stop in chats._ends if stop in following]
    stop = min(stops, default=0)
    if seen:
        return begin, begin + stop
    if not stop:
        return "a call or an empty answer without a stop token, whose end is not seen"
    special = "|".join(map(re.escape, chats._special))
    closing = re.search(rf"(?:\s|{special})*\Z" if texts else rf"(?:{special})\Z", following[:stop])
    return begin + closing.start(), begin + stop  # type: ignore[union-attr]


def cuts(chats: ChatTemplate, whole: str, begin: int, stop: int) -> list[int]:
    """Return where a policy may have stopped within an ending: anywhere but within a special token."""
    tokens = re.finditer("|".join(map(re.escape, chats._special)), whole)
    inside = {place for token in tokens for place in range(token.start() + 1, token.end())}
    return [place for place in range(begin, max(begin, stop) + 1) if place not in inside]


def check_continuations(row: Row, chats: ChatTemplate, chat: Chat, special: list[str]) -> None:
    """Compare what is between two answers with the template's text of the chat; and put special tokens into it."""
    turns = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
    for first, second in pairwise(turns):
        where = f"{chat.where}, after message {first + 1}"
        try:
            compared = list(comparisons(chats, chat, first, second))
            alone = replace(chat, messages=[asked(9), *chat.messages[first:second]])
            differs = any(each.differs for each in compared)
            history = differs and not any(each.differs for each in comparisons(chats, alone, 1, second - first + 1))
        except NotComparable as error:
            row.not_compared[str(error)] += 1
            continue
        except ValueError as error:
            row.not_continued[reason(error)] += 1
            continue
        for each in compared:
            if each.differs and history:
                row.not_compared["the template writes what follows an answer by what is before it"] += 1
            elif each.differs and each.unclear:
                row.not_compared[each.unclear] += 1
            elif each.differs:
                row.differ.append(f"{where}, {each.differs}")
            else:
                row.equal += 1
        check_guard(row, chats, chat, chat.messages[first + 1 : second], special, where)


class NotComparable(Exception):
    """Why what follows an answer cannot be compared."""


@dataclass
class Compared:
    """A continuation; differs: how it differs, if it does. unclear: why it may."""

    differs: str
    unclear: str


def comparisons(chats: ChatTemplate, chat: Chat, first: int, second: int) -> Iterator[Compared]:
    """Compare what is between two answers, for each prefix of the ending of the first one, with the template's text,
    and the ids with those of this text, where a token begins there. Raises NotComparable, or ValueError if the product
    refuses it."""
    between, tokenizer = chat.messages[first + 1 : second], chats.tokenizer
    try:
        whole, prompt = rendered(chats, chat, second), rendered(chats, chat, first)
    except Exception as error:  # of any kind that a template raises
        raise NotComparable(f"the template refuses the chat ({' '.join(str(error).split())[:60]})") from error
    place = ending(chats, whole, prompt, chat.messages[first], texts_of(between[0])[0])
    if isinstance(place, str):
        raise NotComparable(place)
    for end in cuts(chats, whole, *place):
        turn = tokenizer.encode(whole[max(0, place[0] - 200) : end], add_special_tokens=False)
        found = chats.between(between, turn, chat).tolist()
        expected, text, said = whole[end:], tokenizer.decode(found), chat.messages[first]["content"] or ""
        ids, before = (tokenizer.encode(each, add_special_tokens=False) for each in (whole, whole[:end]))
        same = text == expected and (ids[: len(before)] != before or ids[len(before) :] == found)
        how = f"cut at {whole[max(0, end - 30) : end]!r}: {text[:80]!r} for {expected[:80]!r}"
        unclear = ""
        if said != said.rstrip() and whole[:end] != whole[:end].rstrip() and expected != expected.lstrip():
            unclear = "blanks at the end of an answer, of which nobody can say whose they are"
        elif said.strip() and said.strip() in expected:  # a policy wrote it before
            unclear = "the template writes what is beside a call after the call's results"
        yield Compared("" if same else how, unclear)


def check_guard(
    row: Row, chats: ChatTemplate, chat: Chat, between: list[Message], special: list[str], where: str
) -> None:
    """Check that special tokens in messages of an observation are no control tokens."""
    control, forged = {*chats.tokenizer.all_special_ids, *chats.stops}, " ".join(special)
    changed = {"contents": [{**each, "content": each["content"] + forged} for each in between]}
    if between[0]["role"] == "tool":
        changed["names"] = [{**each, "name": f"add{special[0]}"} for each in between]
    try:
        plain = chats.between(between, (), chat).tolist()
        found = {kind: chats.between(messages, (), chat).tolist() for kind, messages in changed.items()}
    except ValueError as error:
        row.notes[f"{where}: special tokens: {reason(error)}"] += 1
        return
    for kind, ids in found.items():
        if [token for token in ids if token in control] != [token for token in plain if token in control]:
            row.errors.append(f"{where}: special tokens in {kind} of an observation became control tokens")
        row.guarded += 1
    if forged not in chats.tokenizer.decode(found["contents"]):
        row.notes[f"{where}: the template writes special tokens in contents otherwise"] += 1


def check(path: Path) -> Row:
    row = Row(path.stem)
    chats, special = release(path)
    for chat in conversations(always="tool_use" in row.name).values():
        check_turns(row, chats, chat)
        check_calls(row, chats, chat)
        check_continuations(row, chats, chat, special)
    return row


def lines(rows: list[Row]) -> Iterator[str]:
    """Yield the table, its totals, and the reasons."""
    width = max(len(row.name) for row in rows)
    yield " ".join([" " * width, *COLUMNS])
    for row in rows:
        yield f"{row.name:{width}} " + " ".join(
            f"{number:{len(column)}}" for number, column in zip(row.numbers(), COLUMNS, strict=True)
        )
    totals = np.sum([row.numbers() for row in rows], axis=0)
    yield f"{f'{len(rows)} templates':{width}} " + " ".join(
        f"{number:{len(column)}}" for number, column in zip(totals, COLUMNS, strict=True)
    )
    for title in ("refused", "not_continued", "not_compared"):
        reasons: Counter[str] = sum((getattr(row, title) for row in rows), Counter())
        for text, number in reasons.most_common():
            names = [row.name for row in rows if text in getattr(row, title)]
            more = f", and {len(names) - 6} more" if len(names) > 6 else ""
            yield f"{title.replace('_', ' ')} {number:4}  {text}  ({', '.join(names[:6])}{more})"
    for title in ("notes", "differ", "errors"):
        yield from (f"{title}  {row.name}: {text}" for row in rows for text in getattr(row, title))


def main() -> int:
    if not 2 <= len(sys.argv) <= 3:
        raise SystemExit(__doc__)
    folder, name = Path(sys.argv[1]), "".join(sys.argv[2:3])
    paths = sorted(path for path in folder.rglob("*.jinja") if name in path.stem)
    if not paths:
        raise SystemExit(f"{folder} has no *.jinja with {name!r} in its name")
    rows = []
    for path in paths:
        rows.append(check(path))
        print(f"{len(rows)} of {len(paths)}: {path.stem}", file=sys.stderr)
    print("\n".join(lines(rows)))
    return 1 if any(row.errors or row.differ for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

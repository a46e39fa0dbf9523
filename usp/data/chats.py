"""Documents with targets: chats, and prompts with completions; read from rows by their keys, and shown on a terminal.

text                                     under --data-field, by default "text"
messages [, tools]                       a chat; also under --data-field
prompt, completion or answer [, tools]   texts, or lists of messages

Of a text, every token is a target of the loss; of the others, only some are.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.text import Text

from usp.run.failures import nearest

from .sources import TEXT_FIELD

Message = dict[str, Any]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

MESSAGES, TOOLS, PROMPT, COMPLETIONS = "messages", "tools", "prompt", ("completion", "answer")
PAIR = {"chosen", "rejected"}
SHOWN = 200  # tokens at each end of a run of tokens that are targets, or that are not
RUNS = 16
OPEN, CLOSE = "⟦", "⟧"


@dataclass(frozen=True)
class Chat:
    """Messages, as a chat template takes them.

    where: file and row, for messages to the user. tools: JSON schemas of functions. prompt: number of messages at the
    beginning that are not trained on; in the others, what the assistant writes is.
    """

    where: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    prompt: int = 0


@dataclass(frozen=True)
class Completed:
    """A prompt, and the completion that is trained on."""

    where: str
    prompt: str
    completion: str


Content = str | Chat | Completed


@dataclass(frozen=True)
class RowKind:
    """keys: that a row must have. chat: whether they hold messages, or a prompt and a completion, instead of a text."""

    keys: tuple[str, ...]
    chat: bool

    @property
    def columns(self) -> tuple[str, ...]:
        """All that is read of a row."""
        return (*self.keys, TOOLS) if self.chat else self.keys


def kind_of(keys: Collection[str], field: str, lists: Collection[str], where: str, what: str = "key") -> RowKind:
    """Return the kind of rows with these keys.

    field: data_field. lists: those of the keys that hold lists. where, what: for the message.

    Raises ValueError, naming `where`, if they are of no kind.
    """
    if field in keys:
        return RowKind((field,), field in lists)
    if field in ("", TEXT_FIELD):
        if MESSAGES in keys:
            return RowKind((MESSAGES,), chat=True)
        for completion in COMPLETIONS:
            if PROMPT in keys and completion in keys:
                return RowKind((PROMPT, completion), chat=True)
    if set(keys) >= PAIR:
        raise ValueError(f"{where}: pairs of a chosen and a rejected response are for rlhf.py: --algorithm dpo")
    raise missing(where, what, field or TEXT_FIELD, keys)


def missing(where: str, what: str, field: str, keys: Collection[str], before: bool = False) -> ValueError:
    """Return the error of a row that lacks a key. before: the rows before it have it."""
    listed = ", ".join(map(repr, keys)) or "none"
    if before:
        return ValueError(
            f"{where}: no {what} {field!r}{nearest(field, keys)}, which the rows before it have; it has {listed}"
        )
    return ValueError(
        f"{where}: no {what} data_field={field!r}{nearest(field, keys)}; it has {listed}: set data_field to the {what} "
        f"that holds the text or the messages (a prompt and a completion are found by these names)"
    )


def content_of(row: Mapping[str, Any], kind: RowKind, where: str) -> Content:
    """Return the document of a row that has the keys of `kind`. Raises ValueError, naming `where` and the key, for what
    is neither text nor messages."""
    if not kind.chat:
        value = row[kind.keys[0]]
        if not isinstance(value, str | None):
            raise ValueError(f"{where}: {kind.keys[0]!r} must hold text, got {type(value).__name__}")
        return value or ""
    tools = tools_of(row, where)
    if len(kind.keys) == 1:
        return Chat(where, messages_of(row[kind.keys[0]], kind.keys[0], where), tools)
    prompt, completion = kind.keys
    return completed((row[prompt], prompt), (row[completion], completion), tools, where)


def completed(
    prompt: tuple[Any, str], completion: tuple[Any, str], tools: list[dict[str, Any]] | None, where: str
) -> Chat | Completed:
    """Return a prompt and its completion, each a value and its key; a chat if the prompt is messages. Raises
    ValueError, naming `where` and the key, for what is neither text nor messages."""
    (value, key), (answer, answer_key) = prompt, completion
    if isinstance(value, str) and key != MESSAGES:
        return Completed(where, value, text_of(answer, answer_key, where))
    messages = messages_of(value, key, where)
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    return Chat(where, [*messages, *messages_of(answer, answer_key, where)], tools, len(messages))


def text_of(value: Any, key: str, where: str) -> str:
    """Return text, or the text of a list of one message. Raises ValueError, naming `where` and `key`, for anything
    else."""
    if isinstance(value, str):
        return value
    messages = messages_of(value, key, where)
    if len(messages) != 1 or not isinstance(messages[0].get("content"), str):
        raise ValueError(f"{where}: {len(messages)} messages under {key!r}, expected text or one message of text")
    return messages[0]["content"]


def messages_of(value: Any, key: str, where: str) -> list[Message]:
    """Check that a value is a list of messages, whose content is left to the chat template. Raises ValueError, naming
    `where` and `key`, if it is not."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: {_described(value)} under {key!r}, expected text or a list of messages")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{where}: a message under {key!r} has no text under 'role': {_described(message)}")
        if message.get("content") is None and message.get("tool_calls") is None:
            raise ValueError(
                f"{where}: a message under {key!r} has neither 'content' nor 'tool_calls': {_described(message)}"
            )
    return value


def tools_of(row: Mapping[str, Any], where: str) -> list[dict[str, Any]] | None:
    """Return the tools of a row, a list of JSON schemas or the JSON text of one; None if it has none. Raises
    ValueError, naming `where`, for anything else."""
    tools = row.get(TOOLS)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools else None
        except ValueError as error:
            raise ValueError(f"{where}: {TOOLS!r} is text, and not JSON ({error})") from error
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"{where}: {_described(tools)} under {TOOLS!r}, expected a list of JSON schemas")
    return tools or None


def texts_in(content: Any) -> Iterator[str]:
    """Yield the texts that a document, or a value in a message, consists of."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Completed):
        yield from (content.prompt, content.completion)
    elif isinstance(content, Chat):
        yield from texts_in(content.messages)
    elif isinstance(content, list | dict):
        for value in content if isinstance(content, list) else content.values():
            yield from texts_in(value)


def _described(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with the keys {', '.join(value) or 'none'}"
    return "an empty list" if value == [] else "null" if value is None else f"a {type(value).__name__}"


def excerpt(ids: Ids, mask: Mask, show: Callable[[Iterable[int]], str], color: bool) -> str:
    """Return the text of a document, its targets in color or between OPEN and CLOSE; long runs are cut in their middle.

    show: returns the text of ids, with special tokens.
    """
    console = Console(file=io.StringIO(), force_terminal=color, no_color=not color, highlight=False, soft_wrap=True)
    text = Text()
    runs = np.split(ids, np.flatnonzero(np.diff(mask)) + 1)
    target = bool(mask[0])
    for run in runs[:RUNS]:
        if len(run) <= 2 * SHOWN:
            shown = show(run.tolist())
        else:
            left_out = f" [... {len(run) - 2 * SHOWN} tokens ...] "
            shown = left_out.join((show(run[:SHOWN].tolist()), show(run[-SHOWN:].tolist())))
        text.append(shown if color or not target else f"{OPEN}{shown}{CLOSE}", style="bold green" if target else "dim")
        target = not target
    if len(runs) > RUNS:
        text.append(f" [... {sum(map(len, runs[RUNS:]))} more tokens]")
    console.print(text, end="")
    return console.file.getvalue()  # type: ignore[attr-defined]

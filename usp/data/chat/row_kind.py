"""What the rows of a file hold, by their keys, and a row as a document.

text                                  under --data-field, by default "text"
messages [, tools]                    a chat; also under --data-field
prompt, completion or answer [, tools]   texts, or lists of messages
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from usp.data.files import TEXT_FIELD
from usp.run.failures import nearest

from .conversation import Chat, Completed, Content, Message

MESSAGES, TOOLS, PROMPT, COMPLETIONS = "messages", "tools", "prompt", ("completion", "answer")
PAIR = {"chosen", "rejected"}


@dataclass(frozen=True)
class RowKind:
    """keys: what a row must have. chat: whether they hold messages, or a completion, rather than a text."""

    keys: tuple[str, ...]
    chat: bool

    @property
    def columns(self) -> tuple[str, ...]:
        """All that is read of a row."""
        return (*self.keys, TOOLS) if self.chat else self.keys


def kind_of(keys: Collection[str], field: str, lists: Collection[str], where: str, what: str = "key") -> RowKind:
    """Return the kind of rows with these keys.

    field: data_field. lists: those of the keys that hold lists. where, what: for the message.

    Raises:
        ValueError: naming `where`, if they are of no kind.
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
    """Return the document of a row that has the keys of `kind`.

    Raises:
        ValueError: naming `where` and the key, for what is neither text nor messages.
    """
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
    """Return a prompt and its completion, each a value and its key; messages if the prompt is messages.

    Raises:
        ValueError: naming `where` and the key, for what is neither text nor messages.
    """
    (asked, key), (answer, answer_key) = prompt, completion
    if isinstance(asked, str) and key != MESSAGES:
        return Completed(where, asked, text_of(answer, answer_key, where))
    given = messages_of(asked, key, where)
    answers = [assistant(answer)] if isinstance(answer, str) else messages_of(answer, answer_key, where)
    return Chat(where, [*given, *answers], tools, len(given))


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def text_of(value: Any, key: str, where: str) -> str:
    """Return text, or the text of a list of one message.

    Raises:
        ValueError: naming `where` and `key`, for anything else.
    """
    if isinstance(value, str):
        return value
    messages = messages_of(value, key, where)
    if len(messages) != 1 or not isinstance(messages[0].get("content"), str):
        raise ValueError(f"{where}: {len(messages)} messages under {key!r}, expected text or one message of text")
    return messages[0]["content"]


def messages_of(value: Any, key: str, where: str) -> list[Message]:
    """Check that a value is a list of messages, whose content is left to the chat template.

    Raises:
        ValueError: naming `where` and `key`, if it is not.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: {_found(value)} under {key!r}, expected text or a list of messages")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{where}: a message under {key!r} has no text under 'role': {_found(message)}")
        if not {"content", "tool_calls"} & {name for name, part in message.items() if part is not None}:
            raise ValueError(
                f"{where}: a message under {key!r} has neither 'content' nor 'tool_calls': {_found(message)}"
            )
    return value


def tools_of(row: Mapping[str, Any], where: str) -> list[dict[str, Any]] | None:
    """Return the tools of a row, a list of JSON schemas or the JSON text of one; None if it has none.

    Raises:
        ValueError: naming `where`, for anything else.
    """
    tools = row.get(TOOLS)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools else None
        except ValueError as error:
            raise ValueError(f"{where}: {TOOLS!r} is text, and not JSON ({error})") from error
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"{where}: {_found(tools)} under {TOOLS!r}, expected a list of JSON schemas")
    return tools or None


def _found(value: Any) -> str:
    """Name a JSON value that is not as expected."""
    if isinstance(value, dict):
        return f"an object with the keys {', '.join(value) or 'none'}"
    return "an empty list" if value == [] else "null" if value is None else f"a {type(value).__name__}"

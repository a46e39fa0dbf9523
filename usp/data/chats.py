"""Documents with targets: chats, and prompts with completions; read from rows by their keys, and shown on a terminal.

messages                                 a chat, also under "conversations" as {"from": ..., "value": ...}
text                                     every token is a target of the loss
prompt, completion or answer             texts, or lists of messages
prompt, response                         a message of the user and its answer, as are all of the following
question, answer or response
instruction [, input or context], output or response

--data-field names the key of the text or the chat, or both keys of a pair. Rows may also have tools, a system message,
chat_template_kwargs, and images: local paths, for parts {"type": "image"} without one, or for <image> in texts. A
message with "train": false or "weight": 0 is not trained on, one with "train": true is.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from usp.run.failures import nearest

from .sources import TEXT_FIELD, read_json

Message = dict[str, Any]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

MESSAGES, CONVERSATIONS, PROMPT, SYSTEM, TOOLS = "messages", "conversations", "prompt", "system", "tools"
TEMPLATE, IMAGES = "chat_template_kwargs", "images"
IMAGE_PART, IMAGE_TEXT = {"type": "image"}, "<image>"  # the latter in texts, as in LLaVA's data
INSTRUCTION, INPUTS = "instruction", ("input", "context")
QUESTIONS, ANSWERS = (PROMPT, "question", INSTRUCTION), ("completion", "answer", "response", "output")
AS_TEXT = {(PROMPT, "completion"), (PROMPT, "answer")}  # texts under these keys are no messages, as in TRL
PAIR = {"chosen", "rejected"}
USER, ASSISTANT, TOOL = "user", "assistant", "tool"
SPEAKERS = {"human": USER, "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT, "observation": TOOL}  # ShareGPT
FOR_TRAINING = ("train", "weight")  # keys of a message that are not the template's
# What renders a chat decides.
NOT_ARGUMENTS = {"messages", "conversations", "tools", "chat_template", "add_generation_prompt"}
NOT_ARGUMENTS |= {"return_assistant_tokens_mask", "continue_final_message"}
SHOWN = 200  # tokens at each end of a run of tokens that are targets, or that are not
RUNS = 16
OPEN, CLOSE = "⟦", "⟧"


@dataclass(frozen=True)
class Image:
    """The sizes of an image, or of a tile that the encoder takes as one. rows: of `pixel_values`. grid: its row of
    `image_grid_thw`, where the processor gives that."""

    rows: int
    patches: int
    tokens: int
    grid: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StoredImage(Image):
    """An image of a document, whose pixels are read when a batch is. digest: of its file. where: file and row of the
    data, for messages."""

    path: str
    digest: str
    where: str


@dataclass(frozen=True)
class Chat:
    """Messages, as a chat template takes them.

    where: file and row, for messages to the user. tools: JSON schemas of functions. prompt: number of messages at the
    beginning that are not trained on; in the others, what the assistant writes is. trained: by the number of a message,
    whether it is trained on in any case or in none. template: further arguments of the chat template. images: their
    files, in the order of the parts that stand for them. plain: the same for a tokenizer without a chat template; None
    if it needs one.
    """

    where: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    prompt: int = 0
    trained: Mapping[int, bool] = field(default_factory=dict)
    template: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[str, ...] = ()
    plain: Completed | None = None


@dataclass(frozen=True)
class Completed:
    """A prompt, and the completion that is trained on."""

    where: str
    prompt: str
    completion: str


Content = str | Chat | Completed


@dataclass(frozen=True)
class RowKind:
    """keys: that a row must have. chat: whether they hold messages, or a prompt and a completion, instead of a text.
    more, unread: the other keys of the first row that are read, and that are not."""

    keys: tuple[str, ...]
    chat: bool
    more: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


def kind_of(keys: Collection[str], field: str, lists: Collection[str], where: str, what: str = "key") -> RowKind:
    """Return the kind of rows with these keys.

    field: data_field; empty: a list of messages comes before a text, and that before other keys. lists: those of the
        keys that hold lists. where, what: for the message.

    Raises ValueError, naming `where`, if they are of no kind.
    """
    candidates: list[tuple[str, ...]] = [(field,), tuple(field.split(","))]
    if field in ("", TEXT_FIELD):
        chats = [(MESSAGES,), (CONVERSATIONS,)]
        first = [] if field else [chat for chat in chats if chat[0] in lists]
        candidates = [*first, (TEXT_FIELD,), *chats, *((prompt, answer) for prompt in QUESTIONS for answer in ANSWERS)]
    read: tuple[str, ...] = next((each for each in candidates if set(each) <= set(keys)), tuple[str, ...]())
    if 0 < len(read) < 3:
        chat = len(read) == 2 or read[0] in lists or read[0] not in (field, TEXT_FIELD)
        optional: tuple[str, ...] = INPUTS if len(read) == 2 and read[0] == INSTRUCTION else ()
        optional += (SYSTEM, TOOLS, TEMPLATE, IMAGES) if chat and (read not in AS_TEXT or read[0] in lists) else ()
        more = tuple(key for key in optional if key in keys)
        return RowKind(read, chat, more, tuple(key for key in keys if key not in (*read, *more)))
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


class NoText(ValueError):
    """A row whose text is empty or null, which is no document and no bad row."""


def content_of(row: Mapping[str, Any], kind: RowKind, where: str) -> Content:
    """Return the document of a row that has the keys of `kind`. Raises ValueError, naming `where` and the key, for what
    is neither text nor messages, and NoText."""
    first = row[kind.keys[0]]
    if not kind.chat:
        if not isinstance(first, str | None):
            raise ValueError(f"{where}: {kind.keys[0]!r} must hold text, got {type(first).__name__}")
        if not first:
            raise NoText(f"{where}: {'null' if first is None else 'an empty text'} under {kind.keys[0]!r}")
        return first
    if len(kind.keys) == 1:
        return chat_of(row, messages_of(first, kind.keys[0], where), where)
    prompt, completion = kind.keys
    if isinstance(first, str) and kind.keys not in AS_TEXT:
        question, answer = question_of(row, prompt, where), text_of(row[completion], completion, where)
        messages = [{"role": USER, "content": question}, {"role": ASSISTANT, "content": answer}]
        return replace(chat_of(row, messages, where), plain=Completed(where, f"{question}\n", answer))
    return completed(row, prompt, completion, where)


def question_of(row: Mapping[str, Any], key: str, where: str) -> str:
    """Return the text under `key`; of an instruction, followed by its input. Raises ValueError, naming `where` and the
    key, for anything but text."""
    keys = (key, *(INPUTS if key == INSTRUCTION else ()))
    return "\n".join(text_of(row[name], name, where) for name in keys if row.get(name))


def completed(row: Mapping[str, Any], prompt: str, completion: str, where: str) -> Chat | Completed:
    """Return a prompt and its completion, under these keys of a row; a chat if the prompt is messages. Raises
    ValueError, naming `where` and the key, for what is neither text nor messages."""
    value, answer = row[prompt], row[completion]
    if isinstance(value, str) and prompt != MESSAGES:
        return Completed(where, value, text_of(answer, completion, where))
    messages = messages_of(value, prompt, where)
    if isinstance(answer, str):
        answer = [{"role": ASSISTANT, "content": answer}]
    return chat_of(row, [*messages, *messages_of(answer, completion, where)], where, len(messages))


def chat_of(row: Mapping[str, Any], messages: Sequence[Message], where: str, prompt: int = 0) -> Chat:
    """Return messages as a chat, with what else a row holds for one: its system message, its tools, and arguments of
    the chat template. prompt: as in `Chat`. Raises ValueError, naming `where` and the key, for what is none of them,
    and for a weight between 0 and 1."""
    if system := row.get(SYSTEM):
        message = {"role": SYSTEM, "content": text_of(system, SYSTEM, where)}
        if messages[0]["role"] != SYSTEM:
            messages, prompt = [message, *messages], prompt + bool(prompt)
        elif messages[0]["content"] != message["content"]:
            raise ValueError(f"{where}: a system message under {SYSTEM!r}, and another one in the messages: keep one")
    trained = {}
    for number, message in enumerate(messages):
        train, weight = message.get("train"), message.get("weight")
        if train not in (None, 0, 1) or weight not in (None, 0, 1):
            what = f"'train': {train!r}" if train not in (None, 0, 1) else f"'weight': {weight!r}"
            raise ValueError(f"{where}: a message with {what}, which must be true or false, or a weight of 0 or 1")
        if weight == 0 or train is not None:
            trained[number] = weight != 0 and train != 0
    messages = [{key: value for key, value in message.items() if key not in FOR_TRAINING} for message in messages]
    template = from_json(row, TEMPLATE, where) or {}
    if not isinstance(template, dict) or template.keys() & NOT_ARGUMENTS:
        names = f"an object without {', '.join(sorted(NOT_ARGUMENTS))}"
        raise ValueError(f"{where}: {_described(template)} under {TEMPLATE!r}, expected {names}")
    messages, images = _with_images(messages, row.get(IMAGES), where)
    return Chat(where, messages, tools_of(row, where), prompt, trained, template, images)


def _with_images(messages: Sequence[Message], listed: Any, where: str) -> tuple[list[Message], tuple[str, ...]]:
    """Return messages in which all images are `IMAGE_PART`, and their files in order. listed: under IMAGES. Raises
    ValueError, naming `where`, for what is no local file, for places without an image, and images without a place."""
    listed = [] if listed is None else list(listed) if isinstance(listed, list | tuple) else [listed]
    rest, found, changed = iter(listed), list[str](), list[Message]()
    for message in messages:
        content = message.get("content")
        if listed and isinstance(content, str) and IMAGE_TEXT in content:
            texts = [{"type": "text", "text": text} for text in content.split(IMAGE_TEXT)]
            content = [part for text in texts for part in (IMAGE_PART, text) if part.get("text") != ""][1:]
        parts = []
        for part in content if isinstance(content, list) else ():
            kind = str(part.get("type", "image" if "image" in part else "text")) if isinstance(part, dict) else "text"
            if kind.startswith(("video", "audio", "input_audio")):
                raise ValueError(f"{where}: a part of type {kind!r}, and only texts and images are read")
            if kind in ("image", "image_url"):
                given = next((part[key] for key in (kind, "path", "url") if part.get(key)), None) or next(rest, None)
                if given is None:
                    raise ValueError(f"{where}: more places for images than the {len(listed)} under {IMAGES!r}")
                found.append(_image_file(given, where))
                part = IMAGE_PART
            parts.append(part)
        changed.append({**message, "content": parts} if parts else message)
    if left := len(list(rest)):
        raise ValueError(
            f"{where}: {left} of {len(listed)} images under {IMAGES!r} have no place in the messages: write a part "
            f'{{"type": "image"}} there, or {IMAGE_TEXT} in a text'
        )
    return changed, tuple(found)


def _image_file(given: Any, where: str) -> str:
    """Return the path of an image. Raises ValueError, naming `where`, for anything else."""
    if isinstance(given, dict):
        given = next((given[key] for key in ("image", "path", "url") if given.get(key)), given)
    if not isinstance(given, str) or given.startswith("data:") or "://" in given.removeprefix("file://"):
        shown = repr(given[:80]) if isinstance(given, str) else _described(given)
        raise ValueError(f"{where}: {shown} for an image, which must be the path of a local file")
    return given.removeprefix("file://")


def text_of(value: Any, key: str, where: str) -> str:
    """Return text, or the text of a list of one message. Raises ValueError, naming `where` and `key`, for anything
    else."""
    if isinstance(value, str):
        return value
    messages = messages_of(value, key, where)
    content = joined(messages[0].get("content"))
    if len(messages) != 1 or not isinstance(content, str):
        raise ValueError(f"{where}: {len(messages)} messages under {key!r}, expected text or one message of text")
    return content


def joined(content: Any) -> Any:
    """Return the content of a message as text if it consists of parts of text, and otherwise unchanged."""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content
    texts = [part.get("text") for part in content if part.get("type", "text") == "text"]
    return "".join(texts) if len(texts) == len(content) and all(isinstance(text, str) for text in texts) else content


def messages_of(value: Any, key: str, where: str) -> list[Message]:
    """Return a list of messages, whose content is left to the chat template; with "from" and "value" as ShareGPT has
    them, they get a role and a content. Raises ValueError, naming `where` and `key`, for anything else."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: {_described(value)} under {key!r}, expected text or a list of messages")
    value = [_with_role(message, where) if isinstance(message, dict) else message for message in value]
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{where}: a message under {key!r} has no text under 'role': {_described(message)}")
        if message.get("content") is None and message.get("tool_calls") is None:
            raise ValueError(
                f"{where}: a message under {key!r} has neither 'content' nor 'tool_calls': {_described(message)}"
            )
    return [_with_arguments(message, where) for message in value]


def _with_arguments(message: Message, where: str) -> Message:
    """Return a message whose tool calls have objects as arguments, also where these are JSON text as OpenAI has them.
    Raises ValueError, naming `where`, for other arguments."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    changed = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else call
        if isinstance(function, dict) and function.get("arguments") is not None:
            arguments = from_json(function, "arguments", where) or {}
            if not isinstance(arguments, dict):
                found = _described(arguments)
                raise ValueError(f"{where}: {found} as arguments of a tool call, expected an object or its JSON text")
            function = function | {"arguments": arguments}
            call = call | {"function": function} if "function" in call else function
        changed.append(call)
    return message | {"tool_calls": changed}


def _with_role(message: Message, where: str) -> Message:
    speaker = message.get("from")
    if "role" in message or not isinstance(speaker, str):
        return message
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    if speaker == "function_call":
        call = {"type": "function", "function": from_json(message, "value", where)}
        return {"role": ASSISTANT, "content": "", "tool_calls": [call], **rest}
    return {"role": SPEAKERS.get(speaker, speaker), "content": message.get("value"), **rest}


def from_json(row: Mapping[str, Any], key: str, where: str) -> Any:
    """Return the value of a row under `key`, or what JSON text there stands for; None if there is none. Raises
    ValueError, naming `where` and `key`, for other text."""
    value = row.get(key)
    if not isinstance(value, str):
        return value
    try:
        return read_json(value) if value else None
    except ValueError as error:
        raise ValueError(f"{where}: {key!r} is text, and not JSON ({error})") from error


def tools_of(row: Mapping[str, Any], where: str) -> list[dict[str, Any]] | None:
    """Return the tools of a row, a list of JSON schemas or the JSON text of one; None if it has none. Raises
    ValueError, naming `where`, for anything else."""
    tools = from_json(row, TOOLS, where)
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
    from rich.console import Console
    from rich.text import Text

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

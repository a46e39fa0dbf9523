"""Local transformers tokenizers, ByT5's as the saved form of the byte tokenizer, and their chat templates.

A chat becomes ids, and a mask of what the assistant writes. With generation marks in the template, both are those of
`apply_chat_template`: a token is the assistant's if any of its characters is between the marks.

Without marks, `_find_spans` finds what the assistant writes by rendering the beginnings of a chat. The messages before
one of the assistant's are rendered with what begins the next one (`add_generation_prompt`): if the whole chat begins
with that, the message begins there. It ends where a chat of the messages up to it ends, if the whole chat begins with
this too, except for special tokens at its end. Templates that write earlier messages in another way, such as without
their reasoning, fail this test. Then a letter is added to the message: if the whole chat has that letter more, and is
otherwise the same, the message ends there, with the special token that follows. Otherwise the chat is refused.

The model has to end its message itself, with a stop token. Where the template writes that as what begins the next
message (GLM), it is part of the message that it ends, and a chat that ends with a message gets it too.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError, UndefinedError
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, TokenizersBackend
from transformers.utils.chat_template_utils import get_json_schema, render_jinja_template

from usp.data.chats import ASSISTANT, TOOL, USER, Chat, Ids, Mask, Message, StoredImage, joined
from usp.data.tokenizer import BYTE_EOS, BYTES, ByteTokenizer, TextTokenizer, Tokenizer
from usp.parallel import Violation, option
from usp.presets import PRESETS

from .models import stop_tokens
from .processors import COPIED, Images

MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
BLANK = re.compile(r"\s*")
LAST = "last"
AUTO = "auto"
# A directory with one of these holds a tokenizer.
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
BESIDE = "tokenizer"  # directory beside a model with the byte tokenizer
SHOWN = 60  # characters in messages
TAIL = 64  # tokens at the end of a turn, of which some may be the template's
_TURN = "a7Ukq"  # an answer, or an argument of its calls, that no message contains
# A template is a program: messages that it does not expect may make any operation fail.
FAILURES = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)

Span = tuple[int, int]  # characters


def function_schema(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return how chat templates describe a function, by its types and its docstring as Google writes them. Raises
    ValueError for one that lacks these."""
    try:
        return get_json_schema(function)
    except Exception as error:  # its own kinds, and what types and docstrings of a user make it raise
        raise ValueError(f"{name} needs types, and a docstring with `Args:` that describes each: {error}") from error


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of `tokenizer`, which messages call `name`. train_on: roles whose messages are trained on,
    separated by commas, or "last" for the last message of the assistant. images: of a model that takes some. stops: ids
    that end a response of the model."""

    tokenizer: PreTrainedTokenizerBase
    name: str
    train_on: str = ASSISTANT
    images: Images | None = None
    stops: tuple[int, ...] = ()

    @property
    def _named(self) -> Violation:
        return option("tokenizer", self.name)

    @cached_property
    def fingerprint(self) -> str:
        """Everything that the ids of a chat depend on, besides the tokenizer."""
        content = json.dumps([self.tokenizer.chat_template, self.tokenizer.special_tokens_map], sort_keys=True)
        template = f"template {hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}"
        written = [token for token in self._ends if token in str(self.tokenizer.chat_template)]
        template += f", responses end with {' '.join(written)}" if written else ""
        template += f", {self.images.fingerprint}" if self.images else ""
        return template if self.train_on == ASSISTANT else f"{template}, trained on {self.train_on}"

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        """The texts of `stops`, long ones first."""
        tokens = {str(self.tokenizer.convert_ids_to_tokens(stop) or "") for stop in self.stops}
        return tuple(sorted(tokens - {""}, key=lambda token: (-len(token), token)))

    @cached_property
    def _special(self) -> tuple[str, ...]:
        """The texts of special tokens, those of `stops` included, long ones first."""
        special = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        special |= {*self.tokenizer.all_special_tokens, *self._ends}
        return tuple(sorted(special - {""}, key=lambda token: (-len(token), token)))

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template takes a content that is a list of parts, rather than writing it as Python does."""
        return self._writes([{"type": "text", "text": "a part"}])

    @cached_property
    def takes_only_parts(self) -> bool:
        """Whether the template writes nothing of a content that is a text."""
        return not self._writes("a part") and self.takes_parts

    def _writes(self, content: Any) -> bool:
        chat = Chat("", [{"role": USER, "content": content}])
        try:
            text, _ = self._render(chat, chat.messages)
        except ValueError:
            return False
        return "a part" in text and not re.search("""['"]type['"]""", text)

    def encode(self, chat: Chat) -> tuple[Ids, Mask, list[StoredImage]]:
        """Return the ids of a chat and which of them are trained on, what the assistant writes after the prompt unless
        the chat or `train_on` says otherwise, each (ids,); and the images, whose tokens are never trained on. Raises
        ValueError, naming the row, if the template refuses it, an image cannot be read, or no token is trained on."""
        chat = self._with_text(chat)
        if not (self.tokenizer.is_fast or isinstance(self.tokenizer, ByT5Tokenizer)):
            raise ValueError(f"{chat.where}: chats need a tokenizer.json, which " + self._named + " does not have")
        text, spans = self._spans(chat)
        images = list[StoredImage]()
        if self.images:
            text, spans, images = self.images.place(text, spans, chat.images, chat.where)
        ids, mask = self._tokens(text, spans)
        if self.images:
            is_image, tokens = ids == self.images.token_id, sum(image.tokens for image in images)
            if is_image.sum() != tokens:
                raise ValueError(
                    f"{chat.where}: {is_image.sum()} tokens for images of {tokens} features: the token for images "
                    f"stands in a text, or " + self._named + " is not the model's"
                )
            mask &= ~is_image
        if not mask[1:].any() and (chat.trained or self.train_on != ASSISTANT):
            raise ValueError(
                f"{chat.where}: by train_on={self.train_on}, and by the 'train' and 'weight' of these "
                f"{len(chat.messages)} messages, nothing would be trained on"
            )
        if not mask[1:].any():
            advice = "put {% generation %} and {% endgeneration %} around what the assistant writes in the template"
            raise ValueError(
                f"{chat.where}: by the chat template of " + self._named + f" no token of these {len(chat.messages)} "
                f"messages is the assistant's, so nothing would be trained on: "
                + (advice if any(m["role"] == ASSISTANT for m in chat.messages[chat.prompt :]) else "add its message")
            )
        return ids, mask, images

    def prompt(self, chat: Chat, guarded: bool = False) -> Ids:
        """Return the ids of a chat up to where the assistant's next message begins, shape (ids,). guarded: special
        tokens that are written out in it are text. Raises ValueError, naming the row, if the template refuses it."""
        chat, guard = self._with_text(chat), _unused("\ue000", chat.messages)
        special = re.compile(_any_of(self._special if guarded else ()))
        return self._guarded_tokens(self._render(chat, _guarded([*chat.messages], special, guard), True)[0], guard)

    def between(self, messages: Sequence[Message], turn: Sequence[int] = (), chat: Chat | None = None) -> Ids:
        """Return the ids that follow a turn of the assistant, from what ends it to where its next one begins, with
        `messages` in between, (ids,). Special tokens that are written out in the messages are text.

        turn: ids that the assistant has written. What they have of the template's ending of a turn is not repeated.
        chat: whose tools and arguments of the template hold.

        Raises ValueError if the template refuses the messages."""
        guard, found = _unused("\ue000", messages), list[tuple[int, int, str]]()
        chat = chat or Chat("", [])
        following = _guarded(list(messages), re.compile(_any_of(self._special)), guard)
        results = bool(following) and following[0].get("role") == TOOL
        for called in (True, False) if results else (False,):
            try:
                text, begin = self._following(chat, following, called)
                found.append((self._written(chat, text[begin:], turn), begin, text))
            except ValueError:  # templates may refuse results without calls, or calls
                if not called and not found:
                    raise
        written, begin, text = next(filter(lambda each: each[0], found), found[0])
        begin += written or (self._closed_before(text[begin:], turn) if results else 0)
        whole, before = (self._guarded_tokens(each, guard) for each in (text, text[:begin]))
        # In its place, where it may have other ids than alone; alone if it begins within a token.
        same = np.array_equal(whole[: len(before)], before)
        return whole[len(before) :] if same else self._guarded_tokens(text[begin:], guard)

    def _following(self, chat: Chat, messages: Sequence[Message], called: bool = False) -> tuple[str, int]:
        """Return the text of a chat like `chat` in which `messages` follow a message of the assistant, and where what
        ends that begins. called: it consists of calls of tools, of which the first of `messages` are the results."""
        answer = _unused(_TURN, messages)
        says: Message = {"role": ASSISTANT, "content": "" if called else answer}
        if called:
            results = takewhile(lambda message: message.get("role") == TOOL, messages)
            says["tool_calls"] = [_call_of(result, answer) for result in results]
        whole = [{"role": USER, "content": "Why."}, says, *messages]
        chat = self._with_text(replace(chat, where="an observation", messages=whole, images=()))
        text, _ = self._render(chat, chat.messages, begin=bool(messages))
        alone = self._render(chat, chat.messages[:2])[0] if called else text
        if answer not in text or answer not in alone:
            raise ValueError("the chat template of " + self._named + " does not write what the assistant says")
        at = text.rindex(answer)
        if not called:
            return text, at + len(answer)
        at += _common(text[at:], alone[alone.rindex(answer) :])  # to where a chat may end with the calls, or go on
        tokens = re.compile(_any_of(self._special)).finditer(text, max(0, at - SHOWN), at + SHOWN)
        at = next((token.start() for token in tokens if token.start() < at < token.end()), at)
        return text, at - sum(map(len, _endings(text[:at], self._special)))

    def _written(self, chat: Chat, following: str, turn: Sequence[int]) -> int:
        """Return how many characters of what the template writes after a turn the turn has itself, or leaves out: those
        before its stop token, and the token that it has another stop token for."""
        written = str(self.tokenizer.decode(list(turn[-TAIL:]), spaces_between_special_tokens=False))
        places = range(min(len(following), len(written)), 0, -1)
        most = next((place for place in places if written.endswith(following[:place])), 0)
        last = next((token for token in self._ends if written.endswith(token)), "")
        if most or not last:
            return most
        special = _any_of(self._special)
        if ending := re.match(rf"(?:\s|{special})*?{re.escape(last)}", following):
            return ending.end()
        closed, end = self._following(chat, [])
        other = re.match(special, following)
        if other is None or not closed[end:].rstrip().endswith(last):
            return 0
        # It ends a chat instead of a message (gpt-oss) if what follows ends the user's message too, and begins none.
        return other.end() if closed[:end].rpartition(".")[2].startswith(other[0]) else 0

    def _closed_before(self, following: str, turn: Sequence[int]) -> int:
        """Return how many characters close a call that the turn has closed itself, before a text that it ends with."""
        closing = re.match(_any_of(self._special), following)
        ids: Any = self.tokenizer.convert_tokens_to_ids([*self._special])
        special = dict(zip(ids, self._special, strict=True))
        latest = next((special[token] for token in reversed(turn) if token in special), None)
        return closing.end() if closing and latest == closing[0] else 0

    def _guarded_tokens(self, text: str, guard: str) -> Ids:
        """Return the ids of a text, in which special tokens with `guard` after their first character are text."""
        if guard not in text:
            return self._tokens(text, [])[0]
        guarded = _any_of([f"{token[0]}{guard}{token[1:]}" for token in self._special])
        ids = [np.zeros(0, np.int64)]
        for number, part in enumerate(re.split(f"({guarded})", text)):
            ids.append(self._as_text(part.replace(guard, "")) if number % 2 else self._tokens(part, [])[0])
        return np.concatenate(ids)

    def _as_text(self, token: str) -> Ids:
        """Return the ids of a special token that is written out, none of which is its own."""
        if isinstance(self.tokenizer, ByT5Tokenizer):
            return ByteTokenizer().encode(token)
        parts = [token] if token not in self._ends else [token[:1], token[1:]]  # which may not be marked as special
        return np.concatenate([self._tokens(part, [], split_special_tokens=True)[0] for part in parts])

    def _with_text(self, chat: Chat) -> Chat:
        """Return a chat with parts of text as one text, if the template does not take parts, or with texts as parts, if
        it takes only these. Raises ValueError, naming the row, for other parts in it, and images that nothing reads."""
        if chat.images and self.images is None:
            raise ValueError(
                f"{chat.where}: {len(chat.images)} images, which only train.py reads, for a vision-language model (see "
                f"docs/guides/vision.md)"
            )
        if self.takes_parts and not self.takes_only_parts:
            return chat
        messages = [{**message, "content": joined(message.get("content"))} for message in chat.messages]
        for number, message in enumerate(messages, start=1):
            if self.takes_only_parts and isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
            elif isinstance(message["content"], list) and not self.takes_only_parts:
                parts = f"{chat.where}: message {number} has parts that are not text, which the chat template of "
                raise ValueError(parts + self._named + " does not take")
        return replace(chat, messages=messages)

    def _trained(self, chat: Chat) -> list[int]:
        """Return the numbers of the messages that are trained on."""
        roles, after = self.train_on.split(","), range(chat.prompt, len(chat.messages))
        numbers = {number for number in after if chat.messages[number]["role"] in roles}
        if LAST in roles:
            numbers |= {max((n for n in after if chat.messages[n]["role"] == ASSISTANT), default=-1)}
        return [number for number in after if chat.trained.get(number, number in numbers)]

    def _spans(self, chat: Chat) -> tuple[str, list[Span]]:
        """Return the text of a chat and the characters that are trained on."""
        marked = bool(MARK.search(self.tokenizer.get_chat_template(None, chat.tools)))
        text, spans = self._render(chat, chat.messages, marks=marked)
        written = [number for number, message in enumerate(chat.messages) if message["role"] == ASSISTANT]
        trained = self._trained(chat)
        if marked and trained != [number for number in written if number >= chat.prompt]:
            of_message = dict(zip(written, spans, strict=False)) if len(spans) == len(written) else {}
            found = self._find_spans(chat, text, [number for number in trained if number not in of_message])
            spans = [*(of_message[number] for number in trained if number in of_message), *found]
        elif not marked:
            spans = self._find_spans(chat, text, trained)
            if trained[-1:] == [len(chat.messages) - 1] == written[-1:]:
                text, spans[-1] = self._closed(chat, text, spans[-1])
        elif chat.prompt:
            prompts = (self._render(chat, chat.messages[: chat.prompt], begin)[0] for begin in (True, False))
            length = next((len(prompt) for prompt in prompts if text.startswith(prompt)), None)
            if length is None:
                raise ValueError(
                    f"{chat.where}: the chat template of " + self._named + " writes the prompt in another way when "
                    "the completion follows: give all of the chat under 'messages'"
                )
            spans = [(max(begin, length), end) for begin, end in spans if end > length]
        return text, spans

    def _find_spans(self, chat: Chat, whole: str, numbers: Sequence[int]) -> list[Span]:
        """Return the characters of the rendered chat that each of these messages consists of: what the assistant writes
        or the content of another one, up to the last special token that ends it. Raises ValueError for a message whose
        span cannot be found."""
        special, spans = self._special, list[Span]()
        for number in numbers:
            message = chat.messages[number]
            if message["role"] == ASSISTANT:
                before, _ = self._render(chat, chat.messages[:number], begin=True)
                if not whole.startswith(before):
                    same = _common(whole, before)
                    writes = whole[max(0, same - SHOWN // 2) : same + SHOWN // 2]
                    raise _unknown(chat, number, f"begins it with {before[-SHOWN:]!r}, but writes {writes!r}")
                begin = len(before)
            else:
                after = _end(whole, self._render(chat, chat.messages[:number])[0], special) if number else 0
                begin = -1 if after is None else whole.find(str(message.get("content")).strip(), after)
            end = _end(whole, self._render(chat, chat.messages[: number + 1])[0], special)
            if end is None:
                end = self._end_by_letter(chat, number, whole, special)
            if end is None or not 0 <= begin <= end:
                raise _unknown(chat, number, "writes it in another way when more messages follow")
            spans.append((begin, self._to_stop(whole, begin, end) if message["role"] == ASSISTANT else end))
        return spans

    def _to_stop(self, text: str, begin: int, end: int) -> int:
        """Return where a message ends with the stop token that follows it; `end` if none does, or it has one."""
        after = BLANK.match(text, end).end()  # type: ignore[union-attr]
        stop = next((token for token in self._ends if text.startswith(token, after)), "")
        return end if not stop or text[begin:end].rstrip().endswith(self._ends) else after + len(stop)

    def _closed(self, chat: Chat, text: str, span: Span) -> tuple[str, Span]:
        """Return the text of a chat and the span of the assistant's message that ends it, with the stop token that the
        template writes where another message follows, if it has none."""
        begin, end = span
        if text[end:].strip() or text[begin:end].rstrip().endswith(self._ends):
            return text, span
        calls = chat.messages[-1].get("tool_calls") or ()
        more = [{"role": TOOL, "content": ".", "tool_call_id": call.get("id")} for call in calls]
        try:
            longer, at = self._following(chat, more or [{"role": USER, "content": "."}], bool(more))
        except ValueError:  # a template may refuse such a chat
            return text, span
        ending = longer[at : self._to_stop(longer, at, at)]
        return (text[:end] + ending, (begin, end + len(ending))) if ending else (text, span)

    def _end_by_letter(self, chat: Chat, number: int, whole: str, special: Collection[str]) -> int | None:
        """Return where a message that holds only text ends in `whole`, by adding a letter to it."""
        message = chat.messages[number]
        content = message.get("content")
        if message.keys() - {"role", "content"} or not isinstance(content, str):
            return None
        for text in {content, content.rstrip()}:  # templates keep whitespace at the end, or drop it
            letter = "y" if text.endswith("x") else "x"
            longer = {**message, "content": text + letter}
            changed, _ = self._render(chat, [*chat.messages[:number], longer, *chat.messages[number + 1 :]])
            end = _common(whole, changed)
            token = next((token for token in special if token and whole.startswith(token, end)), None)
            if changed == whole[:end] + letter + whole[end:] and token:
                return end + len(token)
        return None

    def _render(
        self, chat: Chat, messages: Sequence[Message], begin: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text of messages of a chat, and the marked characters. begin: end with what begins an answer."""
        special: dict[str, Any] = dict(self.tokenizer.special_tokens_map)
        try:
            rendered: Any = render_jinja_template(  # annotated as text
                [[{key: value for key, value in message.items() if value is not None} for message in messages]],
                list(chat.tools) if chat.tools else None,
                chat_template=self.tokenizer.get_chat_template(None, chat.tools),
                return_assistant_tokens_mask=marks,
                add_generation_prompt=begin,
                **(special | dict(chat.template)),
            )
        except FAILURES as error:
            other = list(messages)  # what some templates (DeepSeek) expect instead
            if isinstance(error, TypeError):
                other = _arguments_as_text(other)
            elif isinstance(error, UndefinedError):
                other = [{**message, "content": message.get("content") or ""} for message in other]
            if other != list(messages):
                return self._render(chat, other, begin, marks)
            what = "messages"
            if len(messages) < len(chat.messages):
                what = f"first {len(messages)} messages, which show what the assistant writes without marks"
            template = f"{chat.where}: the chat template of " + self._named
            raise ValueError(template + f" fails for the {what}: {error}") from error
        texts, spans = rendered
        return texts[0], spans[0] if marks else []

    def _tokens(self, text: str, spans: list[Span], **options: Any) -> tuple[Ids, Mask]:
        if isinstance(self.tokenizer, ByT5Tokenizer):
            return _bytes(text, spans)
        encoded: Any = self.tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, verbose=False, **options
        )
        ids = np.asarray(encoded["input_ids"], np.int64)
        mask = np.zeros(len(ids), np.bool_)
        # A character may consist of several tokens, and normalizers drop some, which then belong to none.
        first, last = np.asarray(encoded.encodings[0].offsets if spans else [], np.int64).reshape(-1, 2).T
        for begin, end in spans:
            inside = np.flatnonzero((first < end) & (last > begin))
            if len(inside):
                mask[inside[0] : inside[-1] + 1] = True
        return ids, mask


def _bytes(text: str, spans: list[Span]) -> tuple[Ids, Mask]:
    """Return the ids of ByT5 and their mask: a byte is a token, and so is the end of a sequence written out."""
    inside = np.zeros(len(text), np.bool_)
    for begin, end in spans:
        inside[begin:end] = True
    ids, masks, at = [np.zeros(0, np.int64)], [np.zeros(0, np.bool_)], 0
    for part in re.split("(</s>)", text):
        if part == "</s>":
            ids.append(np.array([BYTE_EOS]))
            masks.append(inside[at : at + 1])
        else:
            ids.append(ByteTokenizer().encode(part))
            lengths = [len(character.encode("utf-8", "replace")) for character in part]
            masks.append(np.repeat(inside[at : at + len(part)], lengths))
        at += len(part)
    return np.concatenate(ids), np.concatenate(masks)


def _end(whole: str, ended: str, special: Collection[str]) -> int | None:
    """Return where the last message of `ended` ends in `whole`, which may continue differently after it."""
    endings = _endings(ended, special)
    text = ended[: len(ended) - sum(map(len, endings))]
    if not whole.startswith(text):
        return None
    end = last = len(text)
    for ending in endings:
        if not whole.startswith(ending, end):
            break
        end += len(ending)
        last = end if ending in special else last
    return last if last > len(text) else end


def _endings(text: str, special: Collection[str]) -> list[str]:
    """Return the special tokens and whitespace at the end of a text."""
    endings: list[str] = []
    while text:
        whitespace = text[len(text.rstrip()) :]
        ending = next((token for token in special if token and text.endswith(token)), whitespace)
        if not ending:
            break
        endings.insert(0, ending)
        text = text.removesuffix(ending)
    return endings


def _call_of(result: Message, argument: str) -> dict[str, Any]:
    """Return a call of a tool with such a result."""
    function = {"name": str(result.get("name") or TOOL), "arguments": {argument: ""}}
    return {"type": "function", "id": result.get("tool_call_id") or "call00000", "function": function}


def _arguments_as_text(value: Any, key: str = "") -> Any:
    """Return a value of messages with the arguments of calls as JSON text."""
    if isinstance(value, dict):
        if key == "arguments":
            return json.dumps(value, ensure_ascii=False)
        return {name: _arguments_as_text(item, name) for name, item in value.items()}
    return [_arguments_as_text(item) for item in value] if isinstance(value, list | tuple) else value


def _any_of(tokens: Collection[str]) -> str:
    """Return a regular expression for any of these texts."""
    return "|".join(map(re.escape, tokens)) or "(?!)"


def _unused(text: str, messages: Sequence[Message]) -> str:
    """Return `text` with a hash of the messages behind it, so that none contains it."""
    held = json.dumps(list(messages), default=str)
    return text + hashlib.blake2b(held.encode(), digest_size=12).hexdigest()


def _guarded(value: Any, special: re.Pattern[str], guard: str) -> Any:
    """Return a value of messages with `guard` after the first character of each special token, except in roles."""
    if isinstance(value, str):
        return special.sub(lambda found: f"{found[0][0]}{guard}{found[0][1:]}", value)
    if isinstance(value, dict):
        return {key: item if key in ("role", "type") else _guarded(item, special, guard) for key, item in value.items()}
    return [_guarded(item, special, guard) for item in value] if isinstance(value, list) else value


def _common(first: str, second: str) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def _unknown(chat: Chat, number: int, why: str) -> ValueError:
    return ValueError(
        f"{chat.where}: the chat template does not mark what the assistant generates, and it does not show either: of "
        f"message {number + 1} it {why}; put {{% generation %}} and {{% endgeneration %}} around what the assistant "
        f"writes in the template, in a file that chat_template names"
    )


def tokenizer_of(tokenizer: str, model: str) -> str:
    """Return where the tokenizer is: `tokenizer`, or for `auto` bytes for a preset and otherwise the model's directory.
    Raises ValueError for `auto`, if the model's directory holds no tokenizer."""
    if tokenizer != AUTO:
        return tokenizer
    folder = Path(model).expanduser()
    if model in PRESETS or not (folder / "config.json").is_file():  # no model: refused where models are loaded
        return BYTES
    for candidate in (folder, folder.parent / BESIDE):
        if any((candidate / name).is_file() for name in FILES):
            return str(candidate)
    remedy = f"set tokenizer to the directory of one, or to {BYTES}"
    raise ValueError(option("model", model) + f" holds no tokenizer: {remedy}")


def load_tokenizer(
    tokenizer: str,
    bos: str = AUTO,
    parse_special: bool = False,
    chat_template: str = "",
    train_on: str = ASSISTANT,
    add_tokens: str = "",
    images: Images | None = None,
    model: str = "",
) -> Tokenizer:
    """Return the byte tokenizer, or load one from the local directory `tokenizer`.

    bos: "always" and "never" say whether documents begin with the tokenizer's BOS; "auto" does as the tokenizer.
    parse_special: whether special tokens written out in a text become their ids; in chats they always do, because
        templates write them out.
    chat_template: file with a chat template, instead of the tokenizer's own. train_on: see `ChatTemplate`.
    add_tokens: special tokens that it gets if it lacks them, separated by commas, or a file of them, one a line.
    images: those of a vision-language model, from `load_images`. model: whose responses end chats, see `stop_tokens`;
        default: the one in the directory, if there is one.

    Raises ValueError if the directory has no tokenizer, if `bos` is "always" and the tokenizer has none, if
    `chat_template` does not exist, or if the byte tokenizer is to get tokens.
    """
    given, added = option("tokenizer", tokenizer), option("add_tokens", add_tokens)
    if add_tokens and tokenizer == BYTES:
        raise ValueError(added + ": the byte tokenizer gets none, set tokenizer to a directory")
    if tokenizer == BYTES:
        chats = _chats(ByT5Tokenizer(), chat_template, BYTES, train_on, model=model)
        return _with_bos(ByteTokenizer(chats=chats), bos)
    folder = Path(tokenizer).expanduser()
    if not folder.is_dir():
        raise ValueError(given + f" is not a directory: use a transformers tokenizer's, or {BYTES!r}")
    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any kind: it is transformers' code that runs, on files of any structure
        raise ValueError(given + f": transformers cannot read it: {error}") from error
    if add_tokens:
        loaded.add_tokens(_special_tokens(add_tokens), special_tokens=True)
    if images is not None and not loaded.chat_template:  # older folders have it beside the processor
        loaded.chat_template = images.processor.chat_template
    chats = _chats(loaded, chat_template, tokenizer, train_on, images, model or tokenizer)
    if isinstance(loaded, ByT5Tokenizer) and not parse_special:
        return _with_bos(ByteTokenizer(tokenizer, chats=chats), bos)
    begins = bos == "always" or (bos == AUTO and loaded.bos_token_id in loaded("a", verbose=False)["input_ids"][:1])
    found = TextTokenizer(
        name=tokenizer,
        vocab_size=max(loaded.get_vocab().values()) + 1,
        tokenizer=loaded,
        bos=loaded.bos_token_id if begins else None,  # pyright: ignore[reportArgumentType]
        eos=loaded.eos_token_id,  # pyright: ignore[reportArgumentType]
        parse_special=parse_special,
        backend=_backend(loaded, parse_special),
        chats=chats,
    )
    return _with_bos(found, bos)


def _special_tokens(add_tokens: str) -> list[str]:
    file = Path(add_tokens).expanduser()
    try:
        found = file.read_text("utf-8").splitlines() if file.is_file() else add_tokens.split(",")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(option("add_tokens", add_tokens) + f" cannot be read: {error}") from error
    if not (tokens := [token.strip() for token in found if token.strip()]):
        raise ValueError(option("add_tokens", add_tokens) + " names no tokens")
    return tokens


def _chats(
    loaded: Any, chat_template: str, name: str, train_on: str, images: Images | None = None, model: str = ""
) -> ChatTemplate | None:
    """Give the tokenizer the chat template in a file, if one is named, and return it; None if it has none."""
    if chat_template:
        try:
            loaded.chat_template = Path(chat_template).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(option("chat_template", chat_template) + f" cannot be read: {error}") from error
    if not loaded.chat_template:
        return None
    return ChatTemplate(loaded, name, train_on, images, stop_tokens(model, loaded.eos_token_id))


def _backend(tokenizer: Any, parse_special: bool) -> Any:
    """Return a copy of the tokenizer of the package tokenizers that does the work; None if its class does more."""
    kind = type(tokenizer)
    own = (kind.__call__, getattr(kind, "_encode_plus", None))
    if own != (TokenizersBackend.__call__, TokenizersBackend._encode_plus):
        return None
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = not parse_special
    return backend


def _with_bos(tokenizer: Tokenizer, bos: str) -> Tokenizer:
    if bos == "always" and tokenizer.bos is None:
        raise ValueError(option("bos", bos) + ", but " + option("tokenizer", tokenizer.name) + " has no BOS: use auto")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, checkpoint: Path) -> None:
    """Save the tokenizer for `AutoTokenizer.from_pretrained`: a transformers one in `checkpoint`, with the processor of
    its images, and bytes next to it.

    The byte tokenizer goes to the sibling directory `tokenizer`: for some model types AutoTokenizer would read the
    config.json in `checkpoint` and load that family's tokenizer class instead of ByT5's.
    """
    if isinstance(tokenizer, TextTokenizer):
        tokenizer.tokenizer.save_pretrained(checkpoint)
        images = tokenizer.chats.images if isinstance(tokenizer.chats, ChatTemplate) else None
        for file in (Path(images.folder) / name for name in COPIED) if images else ():
            if file.is_file():
                shutil.copyfile(file, checkpoint / file.name)
    else:
        saved = tokenizer.chats.tokenizer if isinstance(tokenizer.chats, ChatTemplate) else ByT5Tokenizer()
        saved.save_pretrained(checkpoint.parent / BESIDE)

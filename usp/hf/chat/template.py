"""A chat template with its tokenizer: chats to ids, and to what of them the assistant writes.

Of templates with generation marks, ids and masks are those of `apply_chat_template`: a token is the assistant's if any
of its characters is between the marks. What is not marked is found as in `assistant_spans`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from usp.data.chat.conversation import Chat, Ids, Mask, Message
from usp.data.tokenizer import BYTE_EOS, ByteTokenizer

from .assistant_spans import Span, find_spans

MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A template is a program: messages that it does not expect may make any operation fail.
FAILURES = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of `tokenizer`; `name`: that of the tokenizer, for messages."""

    tokenizer: PreTrainedTokenizerBase
    name: str

    @cached_property
    def fingerprint(self) -> str:
        content = json.dumps([self.tokenizer.chat_template, self.tokenizer.special_tokens_map], sort_keys=True)
        return f"template {hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}"

    def encode(self, chat: Chat) -> tuple[Ids, Mask]:
        if not (self.tokenizer.is_fast or isinstance(self.tokenizer, ByT5Tokenizer)):
            raise ValueError(f"{chat.where}: chats need a tokenizer.json, which tokenizer={self.name} does not have")
        text, spans = self._spans(chat)
        ids, mask = self._tokens(text, spans)
        if not mask[1:].any():
            advice = "put {% generation %} and {% endgeneration %} around what the assistant writes in the template"
            raise ValueError(
                f"{chat.where}: by the chat template of tokenizer={self.name} no token of these {len(chat.messages)} "
                f"messages is the assistant's, so nothing would be trained on: "
                + (advice if any(m["role"] == "assistant" for m in chat.messages[chat.given :]) else "add its message")
            )
        return ids, mask

    def prompt(self, chat: Chat) -> Ids:
        text, _ = self._render(chat, chat.messages, begin=True)
        return self._tokens(text, [])[0]

    def _spans(self, chat: Chat) -> tuple[str, list[Span]]:
        """Return the text of a chat and the characters that the assistant writes, after what is given."""
        marked = bool(MARK.search(self.tokenizer.get_chat_template(None, chat.tools)))
        text, spans = self._render(chat, chat.messages, marks=marked)
        if marked and chat.given:
            beginnings = (self._render(chat, chat.messages[: chat.given], begin)[0] for begin in (True, False))
            given = next((one for one in beginnings if text.startswith(one)), None)
            if given is None:
                raise ValueError(
                    f"{chat.where}: the chat template of tokenizer={self.name} writes the prompt in another way when "
                    f"the completion follows: give all of the chat under 'messages'"
                )
            spans = [(max(begin, len(given)), end) for begin, end in spans if end > len(given)]
        if not marked:
            special = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
            special |= set(self.tokenizer.all_special_tokens)
            try:
                render = partial(self._render, chat)
                spans = find_spans(lambda some, begin: render(some, begin)[0], chat.messages, special, chat.given)
            except ValueError as error:
                raise ValueError(f"{chat.where}: {str(error).removeprefix(f'{chat.where}: ')}") from error
        return text, spans

    def _render(
        self, chat: Chat, messages: Sequence[Message], begin: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text of messages of a chat, and what is marked.

        begin: with what begins the assistant's next message.
        """
        special: dict[str, Any] = dict(self.tokenizer.special_tokens_map)
        try:
            rendered: Any = render_jinja_template(  # annotated as text
                [[_present(message) for message in messages]],
                list(chat.tools) if chat.tools else None,
                chat_template=self.tokenizer.get_chat_template(None, chat.tools),
                return_assistant_tokens_mask=marks,
                add_generation_prompt=begin,
                **special,
            )
        except FAILURES as error:
            alone = "messages"
            if len(messages) < len(chat.messages):
                alone = f"first {len(messages)} messages alone, which tell what the assistant writes without marks"
            raise ValueError(
                f"{chat.where}: the chat template of tokenizer={self.name} fails for the {alone}: {error}"
            ) from error
        texts, spans = rendered
        return texts[0], spans[0] if marks else []

    def _tokens(self, text: str, spans: list[Span]) -> tuple[Ids, Mask]:
        if isinstance(self.tokenizer, ByT5Tokenizer):
            return _bytes(text, spans)
        encoded = self.tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids = np.asarray(encoded["input_ids"], np.int64)
        mask = np.zeros(len(ids), np.bool_)
        for begin, end in spans:
            # Normalizers may drop characters, which then belong to no token.
            places = (encoded.char_to_token(at) for at in range(begin, end))
            first = next((place for place in places if place is not None), None)
            places = (encoded.char_to_token(at) for at in range(end - 1, begin - 1, -1))
            last = next((place for place in places if place is not None), None)
            if first is not None and last is not None:
                mask[first : last + 1] = True
        return ids, mask


def _present(message: Message) -> dict[str, Any]:
    """Return a message without the keys that hold null, as `apply_chat_template` takes it."""
    return {key: value for key, value in message.items() if value is not None}


def _bytes(text: str, spans: list[Span]) -> tuple[Ids, Mask]:
    """Return the ids of ByT5 and its mask: a byte is a token, and so is the end of a sequence written out."""
    wanted = np.zeros(len(text) + 1, np.int64)
    for begin, end in spans:
        wanted[begin] += 1
        wanted[end] -= 1
    inside = np.cumsum(wanted) > 0
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

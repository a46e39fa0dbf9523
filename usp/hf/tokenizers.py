"""Local transformers tokenizers, ByT5's as the saved form of the byte tokenizer, and their chat templates.

A chat becomes ids, and a mask of what the assistant writes. With generation marks in the template, both are those of
`apply_chat_template`: a token is the assistant's if any of its characters is between the marks.

Without marks, `_find_spans` finds what the assistant writes by rendering the beginnings of a chat. The messages before
one of the assistant's are rendered with what begins the next one (`add_generation_prompt`): if the whole chat begins
with that, the message begins there. It ends where a chat of the messages up to it ends, if the whole chat begins with
this too, except for special tokens at its end. Templates that write earlier messages in another way, such as without
their reasoning, fail this test. Then a letter is added to the message: if the whole chat has that letter more, and is
otherwise the same, the message ends there, with the special token that follows. Otherwise the chat is refused.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, TokenizersBackend
from transformers.utils.chat_template_utils import render_jinja_template

from usp.data.chats import ASSISTANT, USER, Chat, Ids, Mask, Message, StoredImage, joined
from usp.data.tokenizer import BYTE_EOS, BYTES, ByteTokenizer, TextTokenizer, Tokenizer
from usp.presets import PRESETS

from .processors import COPIED, Images

MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
LAST = "last"
AUTO = "auto"
# A directory with one of these holds a tokenizer.
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
BESIDE = "tokenizer"  # directory beside a model with the byte tokenizer
SHOWN = 60  # characters in messages
_TURN = "a7Ukq"  # an answer that no message contains
# A template is a program: messages that it does not expect may make any operation fail.
FAILURES = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)

Span = tuple[int, int]  # characters


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of `tokenizer`, which messages call `name`. train_on: roles whose messages are trained on,
    separated by commas, or "last" for the last message of the assistant. images: of a model that takes some."""

    tokenizer: PreTrainedTokenizerBase
    name: str
    train_on: str = ASSISTANT
    images: Images | None = None

    @cached_property
    def fingerprint(self) -> str:
        """Everything that the ids of a chat depend on, besides the tokenizer."""
        content = json.dumps([self.tokenizer.chat_template, self.tokenizer.special_tokens_map], sort_keys=True)
        template = f"template {hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}"
        template += f", {self.images.fingerprint}" if self.images else ""
        return template if self.train_on == ASSISTANT else f"{template}, trained on {self.train_on}"

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template takes a content that is a list of parts, rather than writing it as Python does."""
        chat = Chat("", [{"role": USER, "content": [{"type": "text", "text": "a part"}]}])
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
            raise ValueError(f"{chat.where}: chats need a tokenizer.json, which tokenizer={self.name} does not have")
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
                    f"stands in a text, or tokenizer={self.name} is not the model's"
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
                f"{chat.where}: by the chat template of tokenizer={self.name} no token of these {len(chat.messages)} "
                f"messages is the assistant's, so nothing would be trained on: "
                + (advice if any(m["role"] == ASSISTANT for m in chat.messages[chat.prompt :]) else "add its message")
            )
        return ids, mask, images

    def prompt(self, chat: Chat) -> Ids:
        """Return the ids of a chat up to where the assistant's next message begins, shape (ids,). Raises ValueError,
        naming the row, if the template refuses it."""
        chat = self._with_text(chat)
        text, _ = self._render(chat, chat.messages, begin=True)
        return self._tokens(text, [])[0]

    def between(self, messages: Sequence[Message]) -> Ids:
        """Return the ids that follow a message of the assistant, from what ends it to where its next message begins,
        with `messages` in between, (ids,). Raises ValueError if the template refuses them."""
        chat = Chat("", [{"role": USER, "content": "."}, {"role": ASSISTANT, "content": _TURN}, *messages])
        text, _ = self._render(self._with_text(chat), chat.messages, begin=True)
        _, found, following = text.rpartition(_TURN)
        if not found:
            raise ValueError(f"the chat template of tokenizer={self.name} does not write what the assistant says")
        return self._tokens(following, [])[0]

    def _with_text(self, chat: Chat) -> Chat:
        """Return a chat with parts of text as one text, if the template does not take parts. Raises ValueError, naming
        the row, for other parts in it, and for images that nothing reads."""
        if chat.images and self.images is None:
            raise ValueError(
                f"{chat.where}: {len(chat.images)} images, which only train.py reads, for a vision-language model (see "
                f"docs/vision.md)"
            )
        listed = [number for number, message in enumerate(chat.messages) if isinstance(message.get("content"), list)]
        if not listed or self.takes_parts:
            return chat
        messages = [{**message, "content": joined(message.get("content"))} for message in chat.messages]
        for number in listed:
            if not isinstance(messages[number]["content"], str):
                raise ValueError(
                    f"{chat.where}: message {number + 1} has parts that are not text, which the chat template of "
                    f"tokenizer={self.name} does not take"
                )
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
        elif chat.prompt:
            prompts = (self._render(chat, chat.messages[: chat.prompt], begin)[0] for begin in (True, False))
            length = next((len(prompt) for prompt in prompts if text.startswith(prompt)), None)
            if length is None:
                raise ValueError(
                    f"{chat.where}: the chat template of tokenizer={self.name} writes the prompt in another way when "
                    f"the completion follows: give all of the chat under 'messages'"
                )
            spans = [(max(begin, length), end) for begin, end in spans if end > length]
        return text, spans

    def _find_spans(self, chat: Chat, whole: str, numbers: Sequence[int]) -> list[Span]:
        """Return the characters of the rendered chat that each of these messages consists of: what the assistant writes
        or the content of another one, up to the last special token that ends it. Raises ValueError for a message whose
        span cannot be found."""
        special = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        special |= set(self.tokenizer.all_special_tokens)
        spans = []
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
            spans.append((begin, end))
        return spans

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
        """Return the text of messages of a chat, and the characters that are marked. begin: end with what begins the
        assistant's next message."""
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
            what = "messages"
            if len(messages) < len(chat.messages):
                what = f"first {len(messages)} messages, which show what the assistant writes without marks"
            template = f"chat template of tokenizer={self.name}"
            raise ValueError(f"{chat.where}: the {template} fails for the {what}: {error}") from error
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
    endings: list[str] = []  # special tokens and whitespace at the end of `ended`
    text = ended
    while text:
        whitespace = text[len(text.rstrip()) :]
        ending = next((token for token in special if token and text.endswith(token)), whitespace)
        if not ending:
            break
        endings.insert(0, ending)
        text = text.removesuffix(ending)
    if not whole.startswith(text):
        return None
    end = last = len(text)
    for ending in endings:
        if not whole.startswith(ending, end):
            break
        end += len(ending)
        last = end if ending in special else last
    return last if last > len(text) else end


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
    raise ValueError(f"model={model} holds no tokenizer: set tokenizer to the directory of one, or to {BYTES}")


def load_tokenizer(
    tokenizer: str,
    bos: str = AUTO,
    parse_special: bool = False,
    chat_template: str = "",
    train_on: str = ASSISTANT,
    add_tokens: str = "",
    images: Images | None = None,
) -> Tokenizer:
    """Return the byte tokenizer, or load one from the local directory `tokenizer`.

    bos: "always" and "never" say whether documents begin with the tokenizer's BOS; "auto" does as the tokenizer.
    parse_special: whether special tokens written out in a text become their ids; in chats they always do, because
        templates write them out.
    chat_template: file with a chat template, instead of the tokenizer's own. train_on: see `ChatTemplate`.
    add_tokens: special tokens that it gets if it lacks them, separated by commas, or a file of them, one a line.
    images: those of a vision-language model, from `load_images`.

    Raises ValueError if the directory has no tokenizer, if `bos` is "always" and the tokenizer has none, if
    `chat_template` does not exist, or if the byte tokenizer is to get tokens.
    """
    if add_tokens and tokenizer == BYTES:
        raise ValueError(f"add_tokens={add_tokens}: the byte tokenizer gets none, set tokenizer to a directory")
    if tokenizer == BYTES:
        return _with_bos(ByteTokenizer(chats=_chats(ByT5Tokenizer(), chat_template, BYTES, train_on)), bos)
    folder = Path(tokenizer).expanduser()
    if not folder.is_dir():
        raise ValueError(f"tokenizer={tokenizer} is not a directory: use a transformers tokenizer's, or {BYTES!r}")
    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any kind: it is transformers' code that runs, on files of any structure
        raise ValueError(f"tokenizer={tokenizer}: transformers cannot read it: {error}") from error
    if add_tokens:
        loaded.add_tokens(_special_tokens(add_tokens), special_tokens=True)
    if images is not None and not loaded.chat_template:  # older folders have it beside the processor
        loaded.chat_template = images.processor.chat_template
    chats = _chats(loaded, chat_template, tokenizer, train_on, images)
    if isinstance(loaded, ByT5Tokenizer) and not parse_special:
        return _with_bos(ByteTokenizer(tokenizer, chats=chats), bos)
    begins = bos == "always" or (bos == AUTO and loaded.bos_token_id in loaded("a", verbose=False)["input_ids"][:1])
    found = TextTokenizer(
        name=tokenizer,
        vocab_size=max(loaded.get_vocab().values()) + 1,
        tokenizer=loaded,
        bos=loaded.bos_token_id if begins else None,
        eos=loaded.eos_token_id,
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
        raise ValueError(f"add_tokens={add_tokens} cannot be read: {error}") from error
    if not (tokens := [token.strip() for token in found if token.strip()]):
        raise ValueError(f"add_tokens={add_tokens} names no tokens")
    return tokens


def _chats(
    loaded: Any, chat_template: str, name: str, train_on: str, images: Images | None = None
) -> ChatTemplate | None:
    """Give the tokenizer the chat template in a file, if one is named, and return it; None if it has none."""
    if chat_template:
        try:
            loaded.chat_template = Path(chat_template).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"chat_template={chat_template} cannot be read: {error}") from error
    return ChatTemplate(loaded, name, train_on, images) if loaded.chat_template else None


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
        raise ValueError(f"bos={bos}, but tokenizer={tokenizer.name} has no BOS: use auto")
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

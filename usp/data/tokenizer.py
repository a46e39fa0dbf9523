"""Tokenizers: byte-level as in ByT5, or a local transformers tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from usp.parallel import option

from .chats import Chat, Completed, Ids, Mask, StoredImage

Part = tuple[str, str, str]  # a part of a text, with up to CONTEXT characters before and after it

CONTEXT = 512
BYTES = "bytes"
BYTE_OFFSET = 3  # ByT5 reserves 0, 1 and 2 for padding, end of sequence and unknown
BYTE_EOS = 1
BYTE_VOCAB = 384  # 3 + 256 bytes + 125 sentinels, as in transformers' ByT5Tokenizer


@dataclass(frozen=True)
class ByteTokenizer:
    """Byte tokenizer: id = byte of UTF-8 + 3. Same ids as ByT5Tokenizer, without a Python loop.

    name: for messages. vocab_size: one more than the largest id it can produce. bos, eos: ids that begin and end a
    document; None for no such id. chats: its `usp.hf.tokenizers.ChatTemplate`; None without one.
    """

    name: str = BYTES
    vocab_size: int = BYTE_VOCAB
    bos: int | None = None
    eos: int | None = BYTE_EOS
    chats: Any = None

    @property
    def fingerprint(self) -> str:
        """Everything that the ids of a text depend on."""
        return f"{BYTES}, {self.vocab_size}, {self.bos}, {self.eos}"

    def encoder(self, chats: bool = False) -> ByteTokenizer:
        """Return what another process needs to encode texts, and with `chats` also chats."""
        return self if chats else replace(self, chats=None)

    def encode(self, text: str) -> Ids:
        """Return the ids of a text, shape (ids,), without `bos` and `eos`."""
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int64) + BYTE_OFFSET

    encode_text = encode

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        """Return `encode` of each text."""
        return [self.encode(text) for text in texts]

    def encode_parts(self, parts: Sequence[Part]) -> list[Ids]:
        """Return the ids that each part of a text has in it."""
        return [self.encode(text) for _, text, _ in parts]

    def show(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, with special tokens."""
        byte = {i: bytes([i - BYTE_OFFSET]) for i in range(BYTE_OFFSET, BYTE_OFFSET + 256)} | {BYTE_EOS: b"</s>"}
        return b"".join(byte.get(i, b"") for i in ids).decode("utf-8", "replace")

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, without special tokens."""
        return bytes(i - BYTE_OFFSET for i in ids if 0 <= i - BYTE_OFFSET < 256).decode("utf-8", "replace")


@dataclass(frozen=True)
class TextTokenizer:
    """Tokenizer of transformers.

    parse_special: whether special tokens written out in a text become their ids. backend: the tokenizer of the package
    tokenizers that gives the same ids, in half the time because it makes nothing else; None without one.
    """

    name: str
    vocab_size: int
    tokenizer: Any
    bos: int | None
    eos: int | None
    parse_special: bool
    backend: Any = None
    chats: Any = None

    @property
    def fingerprint(self) -> str:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        content = backend.to_str() if backend is not None else repr(sorted(self.tokenizer.get_vocab().items()))
        digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
        return f"{type(self.tokenizer).__name__} {digest}, {self.bos}, {self.eos}, {self.parse_special}"

    @property
    def special_tokens(self) -> list[str]:
        added = (token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special)
        return sorted({*self.tokenizer.all_special_tokens, *added} - {""})

    def encoder(self, chats: bool = False) -> TextTokenizer:
        """Return what another process needs: if there is a backend, transformers only for chats."""
        tokenizer = self.tokenizer if self.backend is None else None
        return replace(self, tokenizer=tokenizer, chats=self.chats if chats else None)

    def encode(self, text: str) -> Ids:
        return self.encode_all([text])[0]

    def encode_text(self, text: str) -> Ids:
        """Return the ids of a text in which special tokens that are written out are text, whatever `parse_special`."""
        return replace(self, parse_special=False, backend=None).encode(text)

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        if self.backend is not None:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.fromiter(encoding.ids, np.int64, len(encoding)) for encoding in encodings]
        encoded = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            split_special_tokens=not self.parse_special,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [np.asarray(ids, dtype=np.int64) for ids in encoded["input_ids"]]

    def encode_parts(self, parts: Sequence[Part]) -> list[Ids]:
        """Return the ids that each part of a text has in it, as long as no more than CONTEXT characters around a cut
        decide on the tokens there. A token across a cut belongs to the part that it begins in."""
        placed = self.backend is not None or self.tokenizer.is_fast  # tokens say which characters they are of
        ids = self.encode_all(["".join(part) if placed else part[1] for part in parts])
        return [self._inside(*each) if placed else each[0] for each in zip(ids, parts, strict=True)]

    def _inside(self, ids: Ids, part: Part) -> Ids:
        """Return those of the ids of a part and what is around it that are of the part."""
        (before, text, after), first, last = part, 0, len(ids)
        begin, end, same = 0, len(before + text), True
        if before:
            head, places = self._tokens(before + text[:CONTEXT])
            begin = _cut(places, len(before))
            first = int((places[:, 0] < begin).sum())
            same = np.array_equal(ids[:first], head[:first])
        if after:
            tail, places = self._tokens(text[-CONTEXT:] + after)
            cut = _cut(places, len(text[-CONTEXT:]))
            end += cut - len(text[-CONTEXT:])
            following = int((places[:, 0] >= cut).sum())
            last -= following
            same &= np.array_equal(ids[last:], tail[len(tail) - following :])
        # Otherwise more than CONTEXT characters decide: the text is cut in the same place on both sides.
        return ids[first:last] if same else self.encode("".join(part)[begin:end])

    def _tokens(self, text: str) -> tuple[Ids, Ids]:
        """Return the ids of a text, and of each the characters that it is of, (ids, 2)."""
        if self.backend is not None:
            encoding = self.backend.encode(text, add_special_tokens=False)
            ids, places = encoding.ids, encoding.offsets
        else:
            special = {"add_special_tokens": False, "split_special_tokens": not self.parse_special}
            encoded = self.tokenizer(text, **special, return_offsets_mapping=True, verbose=False)
            ids, places = encoded["input_ids"], encoded["offset_mapping"]
        return np.asarray(ids, np.int64), np.asarray(places, np.int64).reshape(-1, 2)

    def show(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(list(ids))

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


def _cut(places: Ids, at: int) -> int:
    """Return where the tokens that begin before a place end, but at least that place."""
    return int(places[places[:, 0] < at, 1].max(initial=at))


Tokenizer = ByteTokenizer | TextTokenizer


def fingerprint(tokenizer: Tokenizer, chats: bool) -> str:
    """Return everything that the ids of texts depend on, and with `chats` also those of chats."""
    template = tokenizer.chats.fingerprint if chats and tokenizer.chats else ""
    return f"{tokenizer.fingerprint}, {template}" if template else tokenizer.fingerprint


def same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether every id stands for the same text in both."""
    if isinstance(one, TextTokenizer) and isinstance(other, TextTokenizer):
        return one.tokenizer.get_vocab() == other.tokenizer.get_vocab()
    return type(one) is type(other)


def encode_masked(tokenizer: Tokenizer, content: Chat | Completed) -> tuple[Ids, Mask, list[StoredImage]]:
    """Return the ids of a whole chat or completion, which of them are targets, and its images. Raises ValueError,
    naming the row of a chat without a chat template, or that the template refuses, with an image that cannot be read,
    or of an empty completion.

    A prompt and its completion are one text, as in TRL; targets are those of its tokens from the first one that the
    prompt has not by itself."""
    if isinstance(content, Chat) and (tokenizer.chats is not None or content.plain is None):
        text = ", or for plain text under another key --data-field KEY, such as text"
        return chat_encoder(tokenizer, content.where, text).encode(content)
    pair = content.plain if isinstance(content, Chat) else content
    assert pair is not None
    alone, whole = tokenizer.encode_all([pair.prompt, pair.prompt + pair.completion])
    length = min(len(alone), len(whole))
    same = int(np.argmin(np.append(alone[:length] == whole[:length], False)))
    ids = as_document(tokenizer, whole)
    targets = np.arange(len(ids)) >= same + (tokenizer.bos is not None)
    if len(ids) < 2 or not targets.any():
        raise ValueError(f"{content.where}: the completion has no token to train on: it is empty")
    return ids, targets, []


def unended(tokenizer: Tokenizer, ids: Ids, targets: Mask) -> int:
    """Return how many answers of a chat, runs of targets, have no token that ends a response of the model, without
    which it does not learn to end one; 0 without a chat template, where the tokenizer's EOS ends documents."""
    if tokenizer.chats is None:
        return 0
    edges = np.flatnonzero(np.diff(np.concatenate(([False], targets, [False]))))
    ends = np.concatenate(([0], np.cumsum(np.isin(ids, tokenizer.chats.stops))))[edges]
    return int((ends[::2] == ends[1::2]).sum())


def unended_line(number: int, tokenizer: Tokenizer) -> str:
    """Say how many answers `unended` found; nothing for none."""
    if not number or tokenizer.chats is None:
        return ""
    stops = ", ".join(tokenizer.show([stop]) for stop in tokenizer.chats.stops) or "none is known"
    return (
        f"warning: {number} answers that are trained on have no token that ends a response ({stops}): the model does "
        f"not learn to end these; use a chat template that writes one, or name its end in generation_config.json"
    )


def chat_encoder(tokenizer: Tokenizer, where: str, otherwise: str = "") -> Any:
    """Return `tokenizer.chats`. Raises ValueError, naming `where` and what else can be done, `otherwise`, if the
    tokenizer has no chat template."""
    if tokenizer.chats is None:
        remedy = f" does not have: use a tokenizer with one, or give --chat-template FILE{otherwise}"
        needed = f"{where}: messages need a chat template, which "
        raise ValueError(needed + option("tokenizer", tokenizer.name) + remedy)
    return tokenizer.chats


def as_document(tokenizer: Tokenizer, ids: Ids, *, begin: bool = True, end: bool = True) -> Ids:
    """Return `ids` between the ids that begin and end a document, where the tokenizer has them; a text that ends with
    the latter, written out, gets no second one."""
    before = [tokenizer.bos] if begin and tokenizer.bos is not None else []
    after = [tokenizer.eos] if end and tokenizer.eos is not None and ids[-1:].tolist() != [tokenizer.eos] else []
    return np.concatenate((np.asarray(before, np.int64), ids, np.asarray(after, np.int64)))

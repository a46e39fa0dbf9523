"""Tokenizers: byte-level as in ByT5, or a local transformers tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

BYTES = "bytes"
BYTE_OFFSET = 3  # ByT5 reserves 0, 1 and 2 for padding, end of sequence and unknown
BYTE_EOS = 1
BYTE_VOCAB = 384  # 3 + 256 bytes + 125 sentinels, as in transformers' ByT5Tokenizer


@dataclass(frozen=True)
class ByteTokenizer:
    """Byte tokenizer: id = byte of UTF-8 + 3. Same ids as ByT5Tokenizer, without a Python loop.

    name: for messages. vocab_size: one more than the largest id it can produce. bos, eos: ids that begin and end a
    document; None for no such id.
    """

    name: str = BYTES
    vocab_size: int = BYTE_VOCAB
    bos: int | None = None
    eos: int | None = BYTE_EOS

    @property
    def fingerprint(self) -> str:
        """Everything that the ids of a text depend on."""
        return f"{BYTES}, {self.vocab_size}, {self.bos}, {self.eos}"

    def encoder(self) -> ByteTokenizer:
        """Return what another process needs to encode texts."""
        return self

    def encode(self, text: str) -> Ids:
        """Return the ids of a text, shape (ids,), without `bos` and `eos`."""
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int64) + BYTE_OFFSET

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        """Return `encode` of each text."""
        return [self.encode(text) for text in texts]

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

    @property
    def fingerprint(self) -> str:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        content = backend.to_str() if backend is not None else repr(sorted(self.tokenizer.get_vocab().items()))
        digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
        return f"{type(self.tokenizer).__name__} {digest}, {self.bos}, {self.eos}, {self.parse_special}"

    def encoder(self) -> TextTokenizer:
        """Return what another process needs to encode texts: not transformers, if there is a backend."""
        return self if self.backend is None else replace(self, tokenizer=None)

    def encode(self, text: str) -> Ids:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        if self.backend is not None:
            found = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.fromiter(one.ids, np.int64, len(one)) for one in found]
        encoded = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            split_special_tokens=not self.parse_special,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [np.asarray(ids, dtype=np.int64) for ids in encoded["input_ids"]]

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


Tokenizer = ByteTokenizer | TextTokenizer


def as_document(tokenizer: Tokenizer, ids: Ids, *, begin: bool = True, end: bool = True) -> Ids:
    """Return `ids` between the ids that begin and end a document, where the tokenizer has them."""
    before = [tokenizer.bos] if begin and tokenizer.bos is not None else []
    after = [tokenizer.eos] if end and tokenizer.eos is not None else []
    return np.concatenate((np.asarray(before, np.int64), ids, np.asarray(after, np.int64)))

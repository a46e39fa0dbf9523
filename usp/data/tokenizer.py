"""Tokenizers: byte-level as in ByT5, or a local transformers tokenizer.

Both end a document with their end-of-sequence id, if they have one, and add no other special tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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
    """Byte tokenizer: id = byte + 3, then the end of sequence. Same ids as ByT5Tokenizer, without a Python loop.

    name: for messages. vocab_size: one more than the largest id it can produce.
    """

    name: str = BYTES
    vocab_size: int = BYTE_VOCAB

    def encode(self, document: bytes) -> Ids:
        """Return the ids of a document, shape (ids,)."""
        ids = np.empty(len(document) + 1, dtype=np.int64)
        ids[:-1] = np.frombuffer(document, dtype=np.uint8)
        ids[:-1] += BYTE_OFFSET
        ids[-1] = BYTE_EOS
        return ids

    @property
    def eos(self) -> int:
        """Id that ends a document; None without one."""
        return BYTE_EOS

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, without special tokens."""
        return bytes(i - BYTE_OFFSET for i in ids if 0 <= i - BYTE_OFFSET < 256).decode("utf-8", "replace")


@dataclass(frozen=True)
class TextTokenizer:
    """Tokenizer of transformers, with its end of sequence added to each document."""

    name: str
    vocab_size: int
    tokenizer: Any

    def encode(self, document: bytes) -> Ids:
        text = document.decode("utf-8", "replace")
        ids = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        if self.tokenizer.eos_token_id is not None:
            ids = [*ids, self.tokenizer.eos_token_id]
        return np.asarray(ids, dtype=np.int64)

    @property
    def eos(self) -> int | None:
        return self.tokenizer.eos_token_id

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


Tokenizer = ByteTokenizer | TextTokenizer

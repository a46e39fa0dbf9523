"""When a response ends: with a stop id, or with the token that completes a stop string in its text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from usp.rlhf.graph.calls import Generate

Decode = Callable[[Iterable[int]], str]

_CONTEXT = 8  # characters before a stop string that may depend on where decoding starts


class Stops:
    """Whether a response has ended, by its tokens; every rank decides alike.

    Args:
        decode: a tokenizer's; needed if `work.stop_strings` is not empty.

    Raises:
        ValueError: for stop strings without `decode`.
    """

    def __init__(self, work: Generate, decode: Decode | None) -> None:
        if work.stop_strings and decode is None:
            raise ValueError(f"stop_strings={work.stop_strings} needs a tokenizer: pass decode to Generator")
        self._ids, self._strings, self._decode = frozenset(work.stop_ids), work.stop_strings, decode
        self._reach = max(map(len, self._strings), default=0) + _CONTEXT

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Return whether the last of `tokens` ends the response, which none of those before it did.

        It does if the text of all tokens contains a stop string. That text is decoded only where the text of the last
        tokens contains one, and these are as many as give the last token and the longest stop string before it.
        """
        if tokens[-1] in self._ids:
            return True
        if not self._strings or self._decode is None:
            return False
        length = self._reach
        while len(text := self._decode(tokens[-1 - length : -1])) < self._reach and length < len(tokens):
            length *= 2  # tokens without text, and parts of characters
        text = self._decode(tokens[-1 - length :])
        return self._found(text) and (length >= len(tokens) - 1 or self._found(self._decode(tokens)))

    def _found(self, text: str) -> bool:
        return any(string in text for string in self._strings)


def stop_problems(work: Generate, encode: Callable[[str], Iterable[int]], decode: Decode, vocabulary: int) -> list[str]:
    """Return why a response can never end with one of the stop ids or strings."""
    problems = [
        f"stop id {token} must be from 0 to {vocabulary - 1}, the model's vocabulary"
        for token in work.stop_ids
        if not 0 <= token < vocabulary
    ]
    for string in work.stop_strings:
        ids = list(map(int, encode(string)))
        if not string:
            problems.append("a stop string must not be empty")
        elif string not in decode(ids):
            listed = ",".join(map(str, ids))
            problems.append(f"stop string {string!r} is never in a decoded text: use the stop ids {listed}")
    return problems

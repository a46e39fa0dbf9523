"""What the assistant writes in a chat, found by rendering its beginnings, for templates that do not mark it.

A template is asked how a chat goes on after the messages before one of the assistant's (`add_generation_prompt`), and
how it is when that message has ended. If the whole chat begins with the first, and the second differs from it in
nothing but special tokens at its end, then what is between is what the model has to generate. A template that writes
earlier messages in another way, such as without their reasoning, fails this test, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import takewhile
from typing import Any

Span = tuple[int, int]  # characters
ASSISTANT = "assistant"
SHOWN = 60  # characters in messages

Render = Callable[[int, bool], str]  # the first messages, with or without the beginning of the assistant's next one


def find_spans(render: Render, messages: list[dict[str, Any]], special: Collection[str], first: int = 0) -> list[Span]:
    """Return the characters of the rendered chat that the assistant writes in each of its messages.

    A span ends with the last of the special tokens that end the message, without the whitespace behind it.

    special: special tokens as text. first: the message from which on spans are wanted.

    Raises:
        ValueError: for a message of which this cannot be told.
    """
    whole = render(len(messages), False)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] == ASSISTANT and number >= first:
            before, after = render(number, True), render(number + 1, False)
            if not whole.startswith(before):
                raise _unknown(number, f"begins it with {_tail(before)!r}, but writes {_around(whole, before)!r}")
            end = _end(whole, after, special)
            if end is None or end < len(before):
                raise _unknown(number, "writes it in another way when more messages follow")
            spans.append((len(before), end))
    return spans


def _end(whole: str, ended: str, special: Collection[str]) -> int | None:
    """Return where the last message of `ended` ends in `whole`, which may go on otherwise after it."""
    parts: list[str] = []  # special tokens and whitespace at the end of `ended`
    left = ended
    while left:
        bare = left.rstrip()
        part = next((token for token in special if token and left.endswith(token)), left[len(bare) :])
        if not part:
            break
        parts.insert(0, part)
        left = left.removesuffix(part)
    if not whole.startswith(left):
        return None
    end = last = len(left)
    for part in parts:
        if not whole.startswith(part, end):
            break
        end += len(part)
        last = end if part in special else last
    return last if last > len(left) else end


def _unknown(number: int, why: str) -> ValueError:
    return ValueError(
        f"the chat template does not mark what the assistant generates, and it does not show either: of message "
        f"{number + 1} it {why}; put {{% generation %}} and {{% endgeneration %}} around what the assistant writes in "
        f"the template, in a file that chat_template names"
    )


def _tail(text: str) -> str:
    return text[-SHOWN:]


def _around(whole: str, before: str) -> str:
    """Return what `whole` has where `before` stops being its beginning."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(whole, before, strict=False)))
    return whole[max(0, same - SHOWN // 2) : same + SHOWN // 2]

"""What the assistant writes in a chat, found by rendering its beginnings, for templates that do not mark it.

A template is asked how a chat goes on after the messages before one of the assistant's (`add_generation_prompt`). If
the whole chat begins with that, the message begins there. It ends where a chat of the messages up to it ends, if the
whole chat begins with this too, but for special tokens at its end. Templates that write earlier messages in another
way, such as without their reasoning, fail this test. Then a letter is added to the message: if the whole chat has that
letter more, and is the same otherwise, the message ends there, with the special token that follows. Else it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from usp.data.chat.conversation import Message

Span = tuple[int, int]  # characters
ASSISTANT = "assistant"
SHOWN = 60  # characters in messages

Messages = Sequence[Message]
Render = Callable[[Messages, bool], str]  # with or without the beginning of the assistant's next message


def find_spans(render: Render, messages: Messages, special: Collection[str], first: int = 0) -> list[Span]:
    """Return the characters of the rendered chat that the assistant writes in each of its messages.

    A span ends with the last of the special tokens that end the message, without the whitespace behind it.

    special: special tokens as text. first: the message from which on spans are wanted.

    Raises:
        ValueError: for a message of which this cannot be told.
    """
    whole = render(messages, False)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] == ASSISTANT and number >= first:
            before = render(messages[:number], True)
            if not whole.startswith(before):
                raise _unknown(number, f"begins it with {_tail(before)!r}, but writes {_around(whole, before)!r}")
            end = _end(whole, render(messages[: number + 1], False), special)
            if end is None:
                end = _end_by_letter(render, messages, number, whole, special)
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


def _end_by_letter(render: Render, messages: Messages, number: int, whole: str, special: Collection[str]) -> int | None:
    """Return where a message of text alone ends in `whole`, by adding a letter to it."""
    message = messages[number]
    content = message.get("content")
    if message.keys() - {"role", "content"} or not isinstance(content, str):
        return None
    for text in {content, content.rstrip()}:  # templates keep whitespace at the end, or drop it
        letter = "y" if text.endswith("x") else "x"
        longer = {**message, "content": text + letter}
        changed = render([*messages[:number], longer, *messages[number + 1 :]], False)
        end = _common(whole, changed)
        token = next((token for token in special if token and whole.startswith(token, end)), None)
        if changed == whole[:end] + letter + whole[end:] and token:
            return end + len(token)
    return None


def _common(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


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
    same = _common(whole, before)
    return whole[max(0, same - SHOWN // 2) : same + SHOWN // 2]

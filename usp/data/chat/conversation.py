"""Documents of which only some tokens are targets of the loss: chats, and prompts with completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Message = dict[str, Any]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Chat:
    """Messages, as a chat template takes them.

    where: file and row, for messages to the user. tools: JSON schemas of functions. given: how many of the messages
    come first as a prompt, which is not trained on; of the others, the assistant's are.
    """

    where: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    given: int = 0


@dataclass(frozen=True)
class Completed:
    """A text to begin with and the text that continues it, which is trained on."""

    where: str
    prompt: str
    completion: str


Content = str | Chat | Completed


class ChatEncoder(Protocol):
    """Turns chats into ids, by the chat template of a tokenizer."""

    @property
    def fingerprint(self) -> str:
        """Everything that the ids of a chat depend on, besides the tokenizer."""
        ...

    def encode(self, chat: Chat) -> tuple[Ids, Mask]:
        """Return the ids of a chat and which of them the assistant writes after what is given, each (ids,).

        Raises:
            ValueError: naming the row, if the template refuses it, or if no token is the assistant's.
        """
        ...

    def prompt(self, chat: Chat) -> Ids:
        """Return the ids of a chat up to where the assistant's next message begins, shape (ids,).

        Raises:
            ValueError: naming the row, if the template refuses it.
        """
        ...


def texts_in(content: Any) -> Iterator[str]:
    """Yield the texts that a document, or a part of a message, consists of."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Chat):
        yield from texts_in(content.messages)
    elif isinstance(content, Completed):
        yield from (content.prompt, content.completion)
    elif isinstance(content, list):
        for part in content:
            yield from texts_in(part)
    elif isinstance(content, dict):
        yield from texts_in(list(content.values()))

"""The wall for what a policy, a tool, a server or a page wrote: any text, of any length.

Behind it a text is bounded and has no lone surrogates, which tokenizers and files refuse; JSON is shallow and finite;
and what is wrong with either is a ValueError of one line. All of it takes linear time."""

from __future__ import annotations

import json
import math
from typing import Any

LONGEST = 1 << 20  # characters of a text
DEEPEST = 64  # levels of JSON
# Whose fault it is that a sample has no score: broken code may end the run, what a policy wrote never does.
REWARD_CODE, ENVIRONMENT, TEXT = "reward", "environment", "text"


class Unscored(ValueError):
    """A response is itself why it has no score, such as one after which a judge replies no number."""


def clean(text: str, most: int = LONGEST) -> str:
    """Return a text without lone surrogates, and beyond `most` characters without its middle."""
    if len(text) > most:
        end = len(text) - most // 2
        text = f"{text[: most // 2]}\n[{end - most // 2:,} characters left out]\n{text[end:]}"
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def cleaned(value: Any, most: int = LONGEST, deepest: int = DEEPEST) -> Any:
    """Return a JSON value whose texts are clean. Raises ValueError for another one, and one that is nested deeper."""
    if isinstance(value, str):
        return clean(value, most)
    if value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if not isinstance(value, dict | list | tuple):
        raise ValueError(f"{value} is not a number" if isinstance(value, float) else f"a {type(value).__name__}")
    if not deepest:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    if isinstance(value, dict):
        return {clean(str(key), most): cleaned(each, most, deepest - 1) for key, each in value.items()}
    return [cleaned(each, most, deepest - 1) for each in value]


def read_json(text: str | bytes | bytearray) -> Any:
    """Return the value of JSON, whose texts may have newlines. Raises ValueError where `cleaned` does, and without."""
    try:
        return cleaned(json.loads(text, strict=False))
    except RecursionError as error:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from error


def one_line(error: BaseException) -> str:
    """Return the type of an error and what it says, in one line."""
    return clean(" ".join(f"{type(error).__name__}: {error}"[:2000].split()), 500)

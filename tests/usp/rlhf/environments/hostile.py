"""Hostile texts of policies and tools, drawn from a seed."""

from __future__ import annotations

import json
import random
from typing import Any

PIECES = (
    "\ud83d",
    "\\ud83d",
    "\udc00x",
    "[",
    "]",
    '{"a":',
    "}",
    '"',
    "\\",
    " ",
    "\n",
    "\t",
    "\0",
    "\x1b[2J",
    "\u202e",
    "9",
    "-",
    "e9",
    "NaN",
    "Infinity",
    "1e999",
    "null",
    "true",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "<|im_end|>",
    "</s>",
    "\U0001f600",
    "é",
    "(",
    "**",
    '{"name": "calculate", "arguments": ',
    '{"name": "search", "arguments": {"query": "',
    "1+1",
    "[TOOL_CALLS]",
    "f[ARGS]",
    "<｜tool▁call▁begin｜>",
    "f<｜tool▁sep｜>",
    "<|python_tag|>",
    " to=functions.f",
    "<|message|>",
    "<function=f>",
    "<parameter=x>",
    "<arg_key>x</arg_key>",
    "<arg_value>",
)
LENGTHS = (1, 1, 1, 2, 3, 30, 1200, 70_000)


MOST = 200_000  # characters of a turn


def text(draw: random.Random, most: int = MOST) -> str:
    """A few pieces, each repeated up to 70,000 times."""
    drawn = [(draw.choice(PIECES), draw.choice(LENGTHS)) for _ in range(draw.randint(1, 6))]
    pieces = (piece * min(number, most) for piece, number in drawn)
    return "".join(pieces)[:most]


def value(draw: random.Random, deep: int = 3) -> Any:
    """A JSON value, or nearly one."""
    if deep and draw.random() < 0.4:
        return [value(draw, deep - 1) for _ in range(draw.randint(0, 3))]
    if deep and draw.random() < 0.5:
        return {text(draw, 40): value(draw, deep - 1) for _ in range(draw.randint(0, 3))}
    return draw.choice(
        [None, True, 0, -1, 10**400, 1.5, float("nan"), float("inf"), "", "12 * 7", text(draw, 5000), nested(draw)]
    )


def nested(draw: random.Random) -> Any:
    """A value of many levels."""
    made: Any = "deep"
    for _ in range(draw.choice((3, 70, 300))):
        made = [made] if draw.random() < 0.5 else {"a": made}
    return made


def turn(draw: random.Random) -> str:
    """A policy's turn: text, damaged calls, or calls with any arguments."""
    kind = draw.random()
    if kind < 0.3:
        return text(draw)
    begin, end = draw.choice((("<tool_call>", "</tool_call>"), ("<tool_call>" + " " * 70_000, ""), ("<tool_call>", "")))
    if kind < 0.6:
        return (f"{text(draw, 100)}{begin}{text(draw)}{end}" * draw.choice((1, 1, 20)))[:MOST]
    name = draw.choice(["calculate", "search", "nothing", text(draw, 2000)])
    arguments = draw.choice([{"expression": text(draw, 1200)}, {"query": text(draw)}, value(draw), {"expression": "7"}])
    called = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=draw.random() < 0.7)
    cut = draw.randint(0, len(called)) if draw.random() < 0.3 else len(called)
    return (f"{begin}{called[:cut]}{end}" * draw.choice((1, 1, 1, 40)))[:MOST]


def answer(draw: random.Random) -> Any:
    """What the step of an environment returns: mostly an observation of a tool's or a page's text."""
    observation = draw.choice(
        [
            text(draw),
            text(draw) * 30,
            [{"role": "tool", "content": text(draw)}],
            [{"role": "tool", "content": value(draw)}],
        ]
    )
    return observation, draw.choice([0.0, 1, 1e300, float("nan"), 10**400]) if draw.random() < 0.1 else 0.5, False

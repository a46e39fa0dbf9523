"""Environments of tests; the text of a token is a letter (`letters` of tests/usp/rlhf/generation)."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from usp.rlhf.environments.outside import Unscored


class Echo:
    """Answer a turn with its last letters, as many as turns so far, and the example's answer, which it ends with."""

    def reset(self, sample: dict[str, Any]) -> None:
        self.answer, self.turns = sample["answer"], 0

    def step(self, turn: str) -> tuple[str, float, bool]:
        self.turns += 1
        return turn[-self.turns :] + self.answer, len(turn) / 8, self.turns == 3


class Counts(Echo):
    """Answer a turn with a number of its length, in five turns."""

    def step(self, turn: str) -> tuple[str, float, bool]:
        self.turns += 1
        found = str(len(turn) ** 3 + self.turns * 7)
        return found, len(turn) / 8 - self.turns, self.turns == 5


class Faults:
    """Do what the example's answer says in the second turn."""

    def reset(self, sample: dict[str, Any]) -> None:
        self.fault, self.turns = sample["answer"], 0

    def step(self, turn: str) -> Any:
        self.turns += 1
        if self.turns < 2 or not self.fault:
            return "go on", 1.0, self.turns == 3
        if self.fault == "hang":
            time.sleep(1000)
        if self.fault == "die":
            os._exit(7)
        if self.fault == "fork":
            if os.fork() == 0:
                time.sleep(1000)
            time.sleep(1000)
        if self.fault == "print":
            print("x" * 10**6)
            sys.stdout.write("{}\n")
        if self.fault == "long":
            return "x" * (1 << 25), 0.0, False
        if self.fault == "reward":
            return "", float("nan"), False
        if self.fault == "shape":
            return "one thing"
        if self.fault == "raise":
            raise KeyError("no such thing")
        return "", 2.0, True


class Text:
    """Answer with the number of the turn, and give as much as a turn is long, until one has three letters."""

    def reset(self, sample: dict[str, Any]) -> None:
        assert sample["prompt"].startswith("Question") and sample["prompt_index"] == int(sample["answer"])
        self.turns = sample["sample"] % 2

    def step(self, turn: str) -> tuple[str, float, bool]:
        self.turns += 1
        return f"[{self.turns}]", len(turn) / 4, len(turn) == 3


class Numbers(Text):
    """Answer as `Text` does, with messages."""

    def step(self, turn: str) -> Any:
        number, *others = super().step(turn)
        return [{"role": "user", "content": number}], *others

    def reset(self, sample: dict[str, Any]) -> None:
        self.turns = 0


class Fragile(Text):
    """Fail in the second turn of samples with an odd number."""

    def step(self, turn: str) -> tuple[str, float, bool]:
        if self.turns == 2:
            raise RuntimeError("no more")
        return super().step(turn)


class Pages(Text):
    """Answer with pages that no tokenizer takes, or that are far too long; some responses are beyond scoring."""

    def step(self, turn: str) -> tuple[str, float, bool]:
        _, reward, done = super().step(turn)
        if self.turns == 3:
            raise Unscored("no number: \ud83d" + "x" * 10**6)
        return "\ud83d" if len(turn) % 2 else "page " * 10**6, reward, done


class Silent:
    """Have none of the methods of an environment."""

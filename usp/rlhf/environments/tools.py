"""Tools that a policy calls in its turns, and the environment that runs them.

A turn with calls is answered with what they return, one without ends the episode, and a reward function scores it. What
is wrong with a call is its answer, so that the policy can do better. The standard library alone is imported."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .outside import ENVIRONMENT, REWARD_CODE, clean, one_line
from .ready_rewards import check_sandbox, from_spec, score
from .sandbox import Limits, Unprotected, run_python
from .tool_calls import Schemas, ToolCall, calls_of

NAME = "tools"  # of the ready environment
MOST_CALLS = 16  # of a turn


@dataclass(frozen=True)
class Python:
    """Programs of a policy, in the sandbox. allowed: "unprotected" runs them where the machine lacks a protection, too.
    seconds, output: of a program, and the characters that it may print."""

    allowed: str = ""
    seconds: float = 10.0
    output: int = 4096

    def check(self) -> None:
        """Raise ValueError where programs cannot be confined."""
        check_sandbox("python", self.allowed)

    def __call__(self, code: str) -> str:
        """Run a program, and return what it prints."""
        ran = run_python(code, "", Limits(self.seconds, output=self.output), bool(self.allowed))
        return "\n".join(filter(None, (ran.output.rstrip(), ran.ended))) or "(it printed nothing)"


_CODE = {"type": "object", "properties": {"code": {"type": "string", "description": "The program."}}}
_ABOUT = {"name": "python", "description": "Run a Python program, and return what it prints."}
PYTHON = {"type": "function", "function": {**_ABOUT, "parameters": {**_CODE, "required": ["code"]}}}


def tool_of(spec: str, load: Callable[[str], Any]) -> Callable[..., Any]:
    """Return the function of a spec: `python`, with options or without, or PATH.py:NAME, which `load` takes."""
    return from_spec(spec, {"python": Python}) if spec.partition("=")[0] == "python" else load(spec)


class Toolbox:
    """Functions by the names in their schemas."""

    def __init__(self, functions: Sequence[Callable[..., Any]], schemas: Schemas) -> None:
        self.schemas = schemas
        named = zip([each["function"] for each in schemas], functions, strict=True)
        self._functions = {schema["name"]: (schema["parameters"], function) for schema, function in named}

    def run(self, name: str, arguments: dict[str, Any], seconds: float = math.inf) -> str:
        """Return what a function answers within so many seconds, or what is wrong with the call. Raises OSError or
        Unprotected where this machine is at fault."""
        if seconds <= 0:
            return "Error: no time is left for it in this turn"
        if name not in self._functions:
            return clean(f"Error: there is no function {name!r:.100}, only {', '.join(self._functions)}")
        parameters, function = self._functions[name]
        known = parameters["properties"]
        problems = [f"{each} is missing" for each in parameters.get("required", ()) if each not in arguments]
        problems += [f"{each:.100} is not a parameter" for each in arguments if each not in known]
        texts = [each for each in arguments if known.get(each, {}).get("type") == "string"]
        problems += [f"{each} must be text" for each in texts if not isinstance(arguments[each], str)]
        if problems:
            return clean(f"Error: {name}: {'; '.join(problems[:8])}")
        if isinstance(function, Python):
            function = replace(function, seconds=min(function.seconds, seconds))
        try:
            returned = function(**arguments)
            return clean(returned if isinstance(returned, str) else json.dumps(returned, default=str))
        except (Exception, SystemExit) as error:  # whatever the text of a policy makes a tool raise
            if isinstance(error, Unprotected) or (isinstance(function, Python) and isinstance(error, OSError)):
                raise
            return f"Error: {one_line(error)}"


class ToolEnvironment:
    """An environment that runs the calls of a turn, `MOST_CALLS` at most. chat: it answers with messages, which a chat
    template writes, rather than with text, as Qwen's template writes them. seconds: of all calls of a turn."""

    def __init__(self, toolbox: Toolbox, reward: Callable[..., float], chat: bool, seconds: float = math.inf) -> None:
        self._toolbox, self._reward, self._chat, self._seconds = toolbox, reward, chat, seconds
        self.blames = ENVIRONMENT  # if a step fails

    def reset(self, sample: Mapping[str, Any]) -> None:
        self._sample = sample

    def step(self, turn: str) -> tuple[str | list[dict[str, Any]] | None, float, bool]:
        calls = calls_of(turn, self._toolbox.schemas)
        self.blames = ENVIRONMENT if calls else REWARD_CODE
        if not calls:
            return None, score(self._reward, self._sample, turn), True
        until = time.monotonic() + self._seconds
        answers = [
            f"Error: {call}" if isinstance(call, str) else self._toolbox.run(*call[:2], until - time.monotonic())
            for call in calls[:MOST_CALLS]
        ]
        if len(calls) > MOST_CALLS:
            answers[-1] += f"\nError: the other {len(calls) - MOST_CALLS:,} calls of the turn: at most {MOST_CALLS}"
        if self._chat:
            named = [(call.name, call.id) if isinstance(call, ToolCall) else ("", "") for call in calls[:MOST_CALLS]]
            about = [{"name": name, "tool_call_id": id_ or f"call{at:05}"} for at, (name, id_) in enumerate(named)]
            told = [{"role": "tool", **each, "content": text} for each, text in zip(about, answers, strict=True)]
            return told, 0.0, False
        return "".join(f"\n<tool_response>\n{answer}\n</tool_response>\n" for answer in answers), 0.0, False

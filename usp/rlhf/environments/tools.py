"""Tools that a policy calls in its turns, and the environment that runs them.

A turn with calls is answered with what they return, one without ends the episode, and a reward function scores it. What
is wrong with a call is its answer, so that the policy can do better. The standard library alone is imported."""

from __future__ import annotations

import ast
import math
import operator
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from .outside import ENVIRONMENT, REWARD_CODE, clean, one_line
from .ready_rewards import check_sandbox, from_spec
from .sandbox import Limits, Unprotected, run_python
from .tool_calls import ToolCall, calls_of

NAME = "tools"  # of the ready environment
MOST_CALLS = 16  # of a turn
MOST_WORDS = 32  # of a query
WORD = re.compile(r"\w+")


class ToolFailed(Exception):
    """What a tool answers instead, for the policy to read."""


class Tool(Protocol):
    """What a policy may call; also `check()`, which raises ValueError where it cannot work. schema: of its function, as
    chat templates describe it."""

    schema: dict[str, Any]

    def run(self, arguments: dict[str, str], seconds: float) -> str:
        """Return what it answers within so many seconds. Raises ToolFailed saying what is wrong."""
        ...


def function(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """Return the schema of a function with parameters of text, by their descriptions."""
    properties = {each: {"type": "string", "description": text} for each, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


@dataclass(frozen=True)
class Python:
    """Python programs, in the sandbox. allowed: "unprotected" runs them where the machine lacks a protection, too."""

    schema = function("python", "Run a Python program, and return what it prints.", code="The program.")
    allowed: str = ""
    seconds: float = 10.0
    output: int = 4096

    def check(self) -> None:
        check_sandbox("python", self.allowed)

    def run(self, arguments: dict[str, str], seconds: float = math.inf) -> str:
        limits = Limits(min(self.seconds, seconds), output=self.output)
        ran = run_python(arguments["code"], "", limits, bool(self.allowed))
        return "\n".join(filter(None, (ran.output.rstrip(), ran.ended))) or "(it printed nothing)"


OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "floor")},
    "ceil": math.ceil,
    "round": lambda x: round(x),  # a second parameter may take forever
    "abs": abs,
    "min": min,
    "max": max,
}
CONSTANTS = {"pi": math.pi, "e": math.e}
MOST_BITS = 4096  # of an integer


def calculate(expression: str) -> int | float:
    """Return the value of an arithmetic expression of at most 1,000 characters. Raises ToolFailed."""

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Expression(body):
                return value(body)
            case ast.Constant(int() | float() as number) if not isinstance(number, bool):
                return number
            case ast.Name(name) if name in CONSTANTS:
                return CONSTANTS[name]
            case ast.UnaryOp(kind, operand) if type(kind) in OPERATORS:
                return OPERATORS[type(kind)](value(operand))
            case ast.BinOp(left, kind, right) if type(kind) in OPERATORS:
                a, b = value(left), value(right)
                if isinstance(kind, ast.Pow) and isinstance(a, int) and a.bit_length() * abs(b) > MOST_BITS:
                    raise ToolFailed("a power is too large")
                return OPERATORS[type(kind)](a, b)
            case ast.Call(ast.Name(name), parameters, []) if name in FUNCTIONS:
                return FUNCTIONS[name](*map(value, parameters))
        known = ", ".join((*FUNCTIONS, *CONSTANTS))
        raise ToolFailed(f"it knows numbers, + - * / // % ** ( ), and {known}; not {ast.unparse(node)!r:.100}")

    if len(expression) > 1000:
        raise ToolFailed(f"an expression of {len(expression):,} characters: at most 1,000")
    try:
        result = value(ast.parse(expression.strip(), mode="eval"))
        if isinstance(result, complex) or (isinstance(result, int) and result.bit_length() > MOST_BITS):
            raise ToolFailed(f"the result is {'not real' if isinstance(result, complex) else 'too large'}")
        return int(result) if isinstance(result, float) and result.is_integer() and abs(result) < 2**53 else result
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ToolFailed(f"{type(error).__name__}: {error}") from error


class Calculator:
    """Arithmetic, without running code."""

    schema = function("calculator", "Evaluate an arithmetic expression.", expression="Such as (3 + 4) * sqrt(2).")

    def run(self, arguments: dict[str, str], seconds: float = math.inf) -> str:
        return str(calculate(arguments["expression"]))


@dataclass(frozen=True)
class PassageSearch:
    """Passages of local text files by BM25 (Robertson and Zaragoza, "The Probabilistic Relevance Framework", 2009).

    Attributes:
        path: a .txt, .md or .jsonl file, or a folder of them, which blank lines (.jsonl: lines) divide into passages.
        results: passages that a search returns. longest: characters of a passage that are shown.
    """

    schema = function("search", "Search a collection of texts.", query="Words to look for.")
    path: str
    results: int = 3
    longest: int = 1000

    def check(self) -> None:
        if not self._passages:
            raise ValueError(f"search={self.path} has no .txt, .md or .jsonl file with text")

    def run(self, arguments: dict[str, str], seconds: float = math.inf) -> str:
        found = self.best(arguments["query"])
        return "\n\n".join(text[: self.longest] for text in found) or "(nothing found)"

    def best(self, query: str) -> list[str]:
        """Return the passages with the highest scores above 0, by the first words of a query."""
        lengths, index = self._index
        scores, mean = dict[int, float](), sum(lengths) / max(1, len(lengths))
        for word in WORD.findall(query[: 32 * MOST_WORDS].lower())[:MOST_WORDS]:
            holders = index.get(word, {})
            rarity = math.log(1 + (len(lengths) - len(holders) + 0.5) / (len(holders) + 0.5))
            for number, count in holders.items():
                weight = count * 2.2 / (count + 1.2 * (0.25 + 0.75 * lengths[number] / mean))
                scores[number] = scores.get(number, 0.0) + rarity * weight
        ordered = sorted(scores, key=lambda number: (-scores[number], number))
        return [self._passages[number] for number in ordered[: self.results]]

    @cached_property
    def _passages(self) -> list[str]:
        path = Path(self.path).expanduser()
        found = path.rglob("*") if path.is_dir() else [path]
        files = sorted(each for each in found if each.suffix in (".txt", ".md", ".jsonl") and each.is_file())
        texts: list[str] = []
        for file in files:
            text = file.read_text("utf-8", "replace")
            texts += text.splitlines() if file.suffix == ".jsonl" else re.split(r"\n\s*\n", text)
        return [text.strip() for text in texts if text.strip()]

    @cached_property
    def _index(self) -> tuple[list[int], dict[str, dict[int, int]]]:
        """The words in each passage, and how often each passage with a word has it."""
        lengths, index = list[int](), dict[str, dict[int, int]]()
        for number, counts in enumerate(Counter(WORD.findall(text.lower())) for text in self._passages):
            lengths.append(counts.total())
            for word, count in counts.items():
                index.setdefault(word, {})[number] = count
        return lengths, index


TOOLS: Mapping[str, Callable[..., Tool]] = {"python": Python, "calculator": Calculator, "search": PassageSearch}


class Toolbox:
    """The tools of specs such as `calculator` and `search=FOLDER`, by their functions."""

    def __init__(self, specs: Sequence[str]) -> None:
        self._tools: list[Tool] = [from_spec(spec, TOOLS) for spec in specs]
        self._functions = {tool.schema["function"]["name"]: tool for tool in self._tools}

    def check(self) -> list[dict[str, Any]]:
        """Return the schemas of all functions. Raises ValueError where a tool cannot work, or two have one name."""
        for tool in self._tools:
            getattr(tool, "check", lambda: None)()
        names = Counter(tool.schema["function"]["name"] for tool in self._tools)
        if twice := [name for name, number in names.items() if number > 1]:
            raise ValueError(f"several tools have a function {', '.join(twice)}: give one of them")
        return [tool.schema for tool in self._tools]

    def run(self, name: str, arguments: dict[str, Any], seconds: float = math.inf) -> str:
        """Return what a function answers within so many seconds, or what is wrong with the call. Raises OSError or
        Unprotected where this machine is at fault."""
        try:
            if seconds <= 0:
                raise ToolFailed("no time is left for it in this turn")
            if name not in self._functions:
                raise ToolFailed(f"there is no function {name!r:.100}, only {', '.join(self._functions)}")
            known = self._functions[name].schema["function"]["parameters"]["properties"]
            problems = [f"{each} is missing" for each in known if each not in arguments]
            problems += [f"{each:.100} is not a parameter" for each in arguments if each not in known]
            problems += [f"{each} must be text" for each in known if not isinstance(arguments.get(each, ""), str)]
            if problems:
                raise ToolFailed(f"{name}: {'; '.join(problems[:8])}")
            return clean(self._functions[name].run(arguments, seconds))
        except (OSError, Unprotected):
            raise
        except ToolFailed as error:
            return clean(f"Error: {error}")
        except Exception as error:  # whatever the text of a policy makes a tool raise
            return f"Error: {one_line(error)}"


class ToolEnvironment:
    """An environment that runs the calls of a turn, `MOST_CALLS` at most. chat: it answers with messages, which a chat
    template writes, rather than with text, as Qwen's template writes them. seconds: of all calls of a turn."""

    def __init__(
        self, toolbox: Toolbox, reward: Callable[[str, str, str], float], chat: bool, seconds: float = math.inf
    ) -> None:
        self._toolbox, self._reward, self._chat, self._seconds = toolbox, reward, chat, seconds
        self.blames = ENVIRONMENT  # if a step fails

    def reset(self, sample: Mapping[str, Any]) -> None:
        self._sample = sample

    def step(self, turn: str) -> tuple[str | list[dict[str, Any]] | None, float, bool]:
        calls = calls_of(turn)
        self.blames = ENVIRONMENT if calls else REWARD_CODE
        if not calls:
            return None, self._reward(self._sample["prompt"], turn, self._sample["answer"]), True
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

"""Tools that a policy calls in its turns, and the environment that runs them.

    <tool_call>{"name": "calculator", "arguments": {"expression": "12 * 7"}}</tool_call>      Hermes, Qwen

A turn with calls is answered with what they return, one without ends the episode, and a reward function scores it. What
is wrong with a call is its answer, so that the policy can do better. The standard library alone is imported."""

from __future__ import annotations

import ast
import json
import math
import operator
import os
import re
import selectors
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from .ready_rewards import check_sandbox, from_spec
from .sandbox import Limits, run_python

CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
NAME = "tools"  # of the ready environment
LONGEST = 1 << 20  # bytes of an MCP server's message
WORD = re.compile(r"\w+")


class ToolFailed(Exception):
    """What a tool answers instead, for the policy to read."""


class Tool(Protocol):
    """What a policy may call; also `check()`, which raises ValueError where it cannot work, and `close()`."""

    def schemas(self) -> list[dict[str, Any]]:
        """Return what it offers, each a JSON schema of a function as chat templates describe it."""

    def run(self, name: str, arguments: dict[str, Any]) -> str:
        """Return what a function answers. Raises ToolFailed saying what is wrong."""


def function(name: str, description: str, required: Sequence[str] = (), **parameters: str) -> dict[str, Any]:
    """Return the schema of a function with parameters of text, by their descriptions."""
    properties = {each: {"type": "string", "description": text} for each, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(required or parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


@dataclass(frozen=True)
class Python:
    """Python programs, in the sandbox. allowed: "unprotected" runs them where the machine lacks a protection, too."""

    allowed: str = ""
    seconds: float = 10.0
    output: int = 4096

    def check(self) -> None:
        check_sandbox("python", self.allowed)

    def schemas(self) -> list[dict[str, Any]]:
        return [function("python", "Run a Python program, and return what it prints.", code="The program.")]

    def run(self, name: str, arguments: dict[str, Any]) -> str:
        ran = run_python(arguments["code"], "", Limits(self.seconds, output=self.output), bool(self.allowed))
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

    def schemas(self) -> list[dict[str, Any]]:
        return [function("calculator", "Evaluate an arithmetic expression.", expression="Such as (3 + 4) * sqrt(2).")]

    def run(self, name: str, arguments: dict[str, Any]) -> str:
        return str(calculate(arguments["expression"]))


@dataclass(frozen=True)
class Search:
    """Passages of local text files by BM25 (Robertson and Zaragoza, "The Probabilistic Relevance Framework", 2009).

    Attributes:
        path: a .txt, .md or .jsonl file, or a folder of them, which blank lines (.jsonl: lines) divide into passages.
        results: passages that a search returns. longest: characters of a passage that are shown.
    """

    path: str
    results: int = 3
    longest: int = 1000

    def check(self) -> None:
        if not self._passages:
            raise ValueError(f"search={self.path} has no .txt, .md or .jsonl file with text")

    def schemas(self) -> list[dict[str, Any]]:
        return [function("search", "Search a collection of texts.", query="Words to look for.")]

    def run(self, name: str, arguments: dict[str, Any]) -> str:
        found = self.best(arguments["query"])
        return "\n\n".join(text[: self.longest] for text in found) or "(nothing found)"

    def best(self, query: str) -> list[str]:
        """Return the passages with the highest scores above 0."""
        lengths, index = self._index
        scores, mean = dict[int, float](), sum(lengths) / max(1, len(lengths))
        for word in WORD.findall(query.lower()):
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


@dataclass
class Mcp:
    """The tools of a local server that speaks the Model Context Protocol on its standard input and output
    (modelcontextprotocol.io/specification/2025-06-18, lifecycle and tools). It is not confined.

    Attributes:
        command: as in a shell, without its operators. timeout: seconds of an answer.
    """

    command: str
    timeout: float = 30.0
    _server: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _read: bytearray = field(default_factory=bytearray, init=False)
    _requests: int = field(default=0, init=False)

    def check(self) -> None:
        try:
            self.schemas()
        except ToolFailed as error:
            raise ValueError(f"mcp={self.command}: {error}") from error

    def schemas(self) -> list[dict[str, Any]]:
        tools, cursor = list[dict[str, Any]](), None
        while True:
            listed = self._ask("tools/list", {"cursor": cursor} if cursor else {})
            for tool in listed["tools"]:
                described = {"name": tool["name"], "description": tool.get("description", "")}
                tools.append({"type": "function", "function": {**described, "parameters": tool["inputSchema"]}})
            if not (cursor := listed.get("nextCursor")):
                return tools

    def run(self, name: str, arguments: dict[str, Any]) -> str:
        answer = self._ask("tools/call", {"name": name, "arguments": arguments})
        text = "\n".join(part.get("text", f"({part.get('type')})") for part in answer.get("content", ()))
        if answer.get("isError"):
            raise ToolFailed(text)
        return text

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            for pipe in (self._server.stdin, self._server.stdout):
                assert pipe is not None
                pipe.close()
        self._server, self._read = None, bytearray()

    def _ask(self, method: str, params: Mapping[str, Any]) -> Any:
        """Return the result of a request to the server, which is started if it does not run. Raises ToolFailed."""
        until = time.monotonic() + self.timeout
        try:
            if self._server is None or self._server.poll() is not None:
                self.close()
                pipe, words = subprocess.PIPE, shlex.split(self.command)
                self._server = subprocess.Popen(words, stdin=pipe, stdout=pipe)
                client = {"name": "usp", "version": "1"}
                begin = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
                self._answer(self._send("initialize", begin), until)
                self._send("notifications/initialized")
            return self._answer(self._send(method, params), until)
        except (OSError, ValueError, TimeoutError) as error:
            self.close()  # the next call begins anew
            raise ToolFailed(f"the server failed: {error}") from error

    def _send(self, method: str, params: Mapping[str, Any] | None = None) -> int:
        """Send a request, or a notification without params; return its number."""
        assert self._server is not None and self._server.stdin is not None
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
        if params is not None:
            self._requests += 1
            message |= {"id": self._requests, "params": params}
        self._server.stdin.write(json.dumps(message).encode() + b"\n")
        self._server.stdin.flush()
        return self._requests

    def _answer(self, number: int, until: float) -> Any:
        """Return the result of request `number`; skip other messages."""
        assert self._server is not None and self._server.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._server.stdout, selectors.EVENT_READ)
            while True:
                while b"\n" not in self._read:
                    if not selector.select(max(0.0, until - time.monotonic())):
                        raise TimeoutError(f"it took longer than {self.timeout:g} seconds")
                    piece = os.read(self._server.stdout.fileno(), 1 << 16)
                    self._read += piece
                    if not piece or len(self._read) > LONGEST:
                        raise OSError(f"a message of more than {LONGEST:,} bytes" if piece else "it has ended")
                line, _, self._read = self._read.partition(b"\n")
                message = json.loads(line)
                if message.get("id") == number and "method" not in message:
                    if "error" in message:
                        raise ToolFailed(str(message["error"].get("message")))
                    return message["result"]


TOOLS: Mapping[str, Callable[..., Tool]] = {"python": Python, "calculator": Calculator, "search": Search, "mcp": Mcp}


def calls_of(turn: str) -> list[tuple[str, dict[str, Any]] | str]:
    """Return the calls in a turn, each the name of a function and its arguments, or what is wrong with it."""
    calls: list[tuple[str, dict[str, Any]] | str] = []
    for text in CALL.findall(turn):
        try:
            call = json.loads(text, strict=False)  # with newlines in strings, which policies write
        except ValueError as error:
            calls.append(f"the call is not JSON: {error}")
            continue
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
            calls.append('a call must be {"name": ..., "arguments": {...}}')
        else:
            calls.append((call["name"], arguments))
    return calls


class Toolbox:
    """The tools of specs such as `calculator` and `search=FOLDER`, by their functions."""

    def __init__(self, specs: Sequence[str]) -> None:
        self.tools: list[Tool] = [from_spec(spec, TOOLS) for spec in specs]

    def check(self) -> list[dict[str, Any]]:
        """Return the schemas of all functions. Raises ValueError where a tool cannot work, or two have one name."""
        try:
            for tool in self.tools:
                getattr(tool, "check", lambda: None)()
            schemas = [schema for tool in self.tools for schema in tool.schemas()]
        finally:
            for tool in self.tools:
                getattr(tool, "close", lambda: None)()
        names = Counter(schema["function"]["name"] for schema in schemas)
        if twice := [name for name, number in names.items() if number > 1]:
            raise ValueError(f"several tools have a function {', '.join(twice)}: give one of them")
        return schemas

    @cached_property
    def _functions(self) -> dict[str, tuple[Tool, dict[str, Any]]]:
        return {
            schema["function"]["name"]: (tool, schema["function"]["parameters"])
            for tool in self.tools
            for schema in tool.schemas()
        }

    def run(self, name: str, arguments: dict[str, Any]) -> str:
        """Return what a function answers, or what is wrong with the call."""
        if name not in self._functions:
            return f"Error: there is no function {name!r:.100}, only {', '.join(self._functions)}"
        tool, parameters = self._functions[name]
        known, missing = parameters.get("properties", {}), set(parameters.get("required", ())) - arguments.keys()
        problems = [f"{each} is missing" for each in sorted(missing)]
        problems += [f"{each} is not a parameter" for each in arguments if known and each not in known]
        text = [each for each in arguments if known.get(each, {}).get("type") == "string"]
        problems += [f"{each} must be text" for each in text if not isinstance(arguments[each], str)]
        if problems:
            return f"Error: {name}: {'; '.join(problems)}"
        try:
            return tool.run(name, arguments)
        except ToolFailed as error:
            return f"Error: {error}"


class ToolEnvironment:
    """An environment that runs the calls of a turn. chat: it answers with messages, which a chat template writes,
    rather than with text, as Qwen's template writes them."""

    def __init__(self, toolbox: Toolbox, reward: Callable[[str, str, str], float], chat: bool) -> None:
        self._toolbox, self._reward, self._chat = toolbox, reward, chat

    def reset(self, sample: Mapping[str, Any]) -> None:
        self._sample = sample

    def step(self, turn: str) -> tuple[str | list[dict[str, Any]] | None, float, bool]:
        calls = calls_of(turn)
        if not calls:
            return None, self._reward(self._sample["prompt"], turn, self._sample["answer"]), True
        answers = [f"Error: {call}" if isinstance(call, str) else self._toolbox.run(*call) for call in calls]
        if self._chat:
            return [{"role": "tool", "content": answer} for answer in answers], 0.0, False
        return "".join(f"\n<tool_response>\n{answer}\n</tool_response>\n" for answer in answers), 0.0, False

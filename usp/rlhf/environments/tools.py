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
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from .outside import ENVIRONMENT, REWARD_CODE, clean, one_line, read_json
from .ready_rewards import check_sandbox, from_spec
from .sandbox import Limits, Unprotected, run_python

BEGIN, END = "<tool_call>", "</tool_call>"
NAME = "tools"  # of the ready environment
MOST_CALLS = 16  # of a turn
MOST_BYTES = 1 << 20  # of an MCP server's messages that wait
MOST_WORDS = 32  # of a query
WORD = re.compile(r"\w+")


class ToolFailed(Exception):
    """What a tool answers instead, for the policy to read."""


class Tool(Protocol):
    """What a policy may call; also `check()`, which raises ValueError where it cannot work, and `close()`."""

    def schemas(self, seconds: float = math.inf) -> list[dict[str, Any]]:
        """Return what it offers, each a JSON schema of a function as chat templates describe it."""
        ...

    def run(self, name: str, arguments: dict[str, Any], seconds: float = math.inf) -> str:
        """Return what a function answers within so many seconds. Raises ToolFailed saying what is wrong."""
        ...


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

    def schemas(self, seconds: float = math.inf) -> list[dict[str, Any]]:
        return [function("python", "Run a Python program, and return what it prints.", code="The program.")]

    def run(self, name: str, arguments: dict[str, Any], seconds: float = math.inf) -> str:
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

    def schemas(self, seconds: float = math.inf) -> list[dict[str, Any]]:
        return [function("calculator", "Evaluate an arithmetic expression.", expression="Such as (3 + 4) * sqrt(2).")]

    def run(self, name: str, arguments: dict[str, Any], seconds: float = math.inf) -> str:
        return str(calculate(arguments["expression"]))


@dataclass(frozen=True)
class PassageSearch:
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

    def schemas(self, seconds: float = math.inf) -> list[dict[str, Any]]:
        return [function("search", "Search a collection of texts.", query="Words to look for.")]

    def run(self, name: str, arguments: dict[str, Any], seconds: float = math.inf) -> str:
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


@dataclass
class Mcp:
    """The tools of a local server that speaks the Model Context Protocol on its standard input and output
    (modelcontextprotocol.io/specification/2025-06-18, lifecycle and tools). It is not confined.

    Attributes:
        command: as in a shell, without its operators. timeout: seconds of an answer. output: its characters.
    """

    command: str
    timeout: float = 30.0
    output: int = 1 << 14
    _server: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _lines: deque[bytearray] = field(default_factory=deque, init=False)  # that came, the last of which has no end
    _held: int = field(default=0, init=False)  # bytes of them
    _unsent: bytearray = field(default_factory=bytearray, init=False)
    _requests: int = field(default=0, init=False)

    def check(self) -> None:
        try:
            self.schemas()
        except ToolFailed as error:
            raise ValueError(f"mcp={self.command}: {error}") from error

    def schemas(self, seconds: float = math.inf) -> list[dict[str, Any]]:
        tools, cursor, until = list[dict[str, Any]](), None, time.monotonic() + min(self.timeout, seconds)
        while True:
            listed = self._ask("tools/list", {"cursor": cursor} if cursor else {}, until - time.monotonic())
            try:
                tools += [function_of(tool) for tool in listed["tools"]]
            except (LookupError, TypeError, AttributeError) as error:
                raise ToolFailed(f"the server's tools are malformed: {one_line(error)}") from error
            if not (cursor := listed.get("nextCursor")):
                return tools

    def run(self, name: str, arguments: dict[str, Any], seconds: float = math.inf) -> str:
        answer = self._ask("tools/call", {"name": name, "arguments": arguments}, min(self.timeout, seconds))
        parts = answer.get("content", [])
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise ToolFailed("the content of the server's answer is no list of objects")
        texts = [part["text"] if isinstance(part.get("text"), str) else f"({part.get('type')})" for part in parts]
        text = clean("\n".join(texts), self.output)
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
        self._server, self._lines, self._held, self._unsent = None, deque([bytearray()]), 0, bytearray()

    def _ask(self, method: str, params: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return the result of a request to the server, which is started if it does not run. Raises ToolFailed."""
        until = time.monotonic() + seconds
        try:
            if self._server is None or self._server.poll() is not None:
                self.close()
                pipe, words = subprocess.PIPE, shlex.split(self.command)
                self._server = subprocess.Popen(words, stdin=pipe, stdout=pipe, bufsize=0)
                assert self._server.stdin is not None
                os.set_blocking(self._server.stdin.fileno(), False)
                client = {"name": "usp", "version": "1"}
                begin = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
                self._answer("initialize", begin, until)
                self._send({"method": "notifications/initialized"})
            return self._answer(method, params, until)
        except (OSError, ValueError) as error:
            self.close()  # the next call begins anew
            late = f"it took longer than {seconds:.3g} seconds" if isinstance(error, TimeoutError) else one_line(error)
            raise ToolFailed(f"the server failed: {late}") from error

    def _send(self, message: Mapping[str, Any]) -> None:
        """Send a message, while waiting for the next one."""
        self._unsent += json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"

    def _answer(self, method: str, params: Mapping[str, Any], until: float) -> dict[str, Any]:
        """Return the result of a request. Raises ToolFailed for an error, and OSError or ValueError without either."""
        self._requests += 1
        self._send({"method": method, "id": self._requests, "params": params})
        while True:
            message = read_json(self._line(until))
            for each in message if isinstance(message, list) else [message]:
                if not isinstance(each, dict):
                    raise ValueError(f"a message is no object: {each!r:.100}")
                if "method" in each:  # of the server: a ping is all that a client without capabilities knows
                    if each.get("id") is not None:
                        unknown = {"error": {"code": -32601, "message": "Method not found"}}
                        self._send({"id": each["id"], **({"result": {}} if each["method"] == "ping" else unknown)})
                elif "error" in each and each.get("id") in (self._requests, None):
                    error = each["error"]
                    said = str(error.get("message") if isinstance(error, dict) else error)
                    raise ToolFailed(clean(said, self.output))
                elif each.get("id") == self._requests:
                    if not isinstance(each.get("result"), dict):
                        raise ValueError(f"the result is no object: {each.get('result')!r:.100}")
                    return each["result"]

    def _line(self, until: float) -> bytearray:
        """Return the server's next line, after sending what waits. Raises OSError if that fails or takes too long."""
        assert self._server is not None and self._server.stdin is not None and self._server.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._server.stdout, selectors.EVENT_READ)
            while len(self._lines) < 2 or self._unsent:
                if self._unsent and len(selector.get_map()) < 2:
                    selector.register(self._server.stdin, selectors.EVENT_WRITE)
                ready = selector.select(max(0.0, until - time.monotonic()))
                if time.monotonic() >= until:
                    raise TimeoutError
                for key, _ in ready:
                    if key.fileobj is self._server.stdin:
                        del self._unsent[: os.write(key.fd, self._unsent[: 1 << 16])]
                        if not self._unsent:
                            selector.unregister(key.fileobj)
                        continue
                    if not (piece := os.read(key.fd, 1 << 16)):
                        raise OSError("it has ended")
                    first, *others = piece.split(b"\n")
                    self._lines[-1] += first
                    self._lines += map(bytearray, others)
                    self._held += len(piece)
                if max(len(self._unsent), self._held) > MOST_BYTES:
                    raise OSError(f"messages of more than {MOST_BYTES:,} bytes")
        if time.monotonic() >= until:
            raise TimeoutError
        self._held -= len(self._lines[0]) + 1
        return self._lines.popleft()


def function_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a server's tool. Raises LookupError, TypeError or AttributeError for a malformed one."""
    name, schema = tool["name"], tool["inputSchema"]
    if not (isinstance(name, str) and isinstance(schema.get("properties", {}), dict)):
        raise TypeError(f"{name!r:.100} needs a name, and properties in its inputSchema")
    if not all(isinstance(each, str) for each in schema.get("required", [])):
        raise TypeError(f"{name:.100}: what is required must be names")
    described = {"name": name, "description": str(tool.get("description", ""))}
    return {"type": "function", "function": {**described, "parameters": schema}}


TOOLS: Mapping[str, Callable[..., Tool]] = {
    "python": Python,
    "calculator": Calculator,
    "search": PassageSearch,
    "mcp": Mcp,
}


def texts_of_calls(turn: str) -> Iterator[str]:
    """Yield what stands between the marks of each call; the last may lack its end."""
    place = 0
    while (begin := turn.find(BEGIN, place)) >= 0:
        end = turn.find(END, begin)
        place = end + len(END) if end >= 0 else len(turn)
        yield turn[begin + len(BEGIN) : end if end >= 0 else None].strip()


def calls_of(turn: str) -> list[tuple[str, dict[str, Any]] | str]:
    """Return the calls in a turn, each the name of a function and its arguments, or what is wrong with it."""
    calls: list[tuple[str, dict[str, Any]] | str] = []
    for text in texts_of_calls(turn):
        try:
            call = read_json(text)
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
        self._functions: dict[str, tuple[Tool, dict[str, Any]]] = {}
        self._unlisted = list(self.tools)  # whose functions are not known

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

    def run(self, name: str, arguments: dict[str, Any], seconds: float = math.inf) -> str:
        """Return what a function answers within so many seconds, or what is wrong with the call. Raises OSError or
        Unprotected where this machine is at fault."""
        until = time.monotonic() + seconds
        try:
            while self._unlisted and seconds > 0:
                for schema in self._unlisted[0].schemas(seconds):
                    self._functions[schema["function"]["name"]] = (self._unlisted[0], schema["function"]["parameters"])
                self._unlisted.pop(0)
                seconds = until - time.monotonic()
            if seconds <= 0:
                raise ToolFailed("no time is left for it in this turn")
            if name not in self._functions:
                raise ToolFailed(f"there is no function {name!r:.100}, only {', '.join(self._functions)}")
            tool, parameters = self._functions[name]
            if problems := list(islice(problems_of(arguments, parameters), 8)):
                raise ToolFailed(f"{name}: {'; '.join(problems)}")
            return clean(tool.run(name, arguments, seconds))
        except (OSError, Unprotected):
            raise
        except ToolFailed as error:
            return clean(f"Error: {error}")
        except Exception as error:  # whatever the text of a policy or a server makes a tool raise
            return f"Error: {one_line(error)}"


def problems_of(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the arguments of a function, by the JSON schema of its parameters."""
    known = parameters.get("properties", {})
    yield from (f"{each} is missing" for each in parameters.get("required", ()) if each not in arguments)
    yield from (f"{each:.100} is not a parameter" for each in arguments if known and each not in known)
    for each, value in arguments.items():
        schema = known.get(each)
        if isinstance(schema, dict) and schema.get("type") == "string" and not isinstance(value, str):
            yield f"{each:.100} must be text"


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
            f"Error: {call}" if isinstance(call, str) else self._toolbox.run(*call, until - time.monotonic())
            for call in calls[:MOST_CALLS]
        ]
        if len(calls) > MOST_CALLS:
            answers[-1] += f"\nError: the other {len(calls) - MOST_CALLS:,} calls of the turn: at most {MOST_CALLS}"
        if self._chat:
            return [{"role": "tool", "content": answer} for answer in answers], 0.0, False
        return "".join(f"\n<tool_response>\n{answer}\n</tool_response>\n" for answer in answers), 0.0, False

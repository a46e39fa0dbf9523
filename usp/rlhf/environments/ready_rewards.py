"""Rewards by name, of a prompt, a response and its answer. They import the standard library alone, so that processes
beside the ranks start fast, and one that needs more says so in `check`."""

from __future__ import annotations

import inspect
import json
import re
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

from .outside import REWARD_CODE, Unscored, clean
from .sandbox import Limits, Unprotected, run_python

T = TypeVar("T")
FAULTS = (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)  # of a server

REWARD = "reward"  # the environment `Scored`
UNPROTECTED = "unprotected"  # the value that allows programs on a machine that lacks a protection
BENCHMARK = "benchmark"  # the reward that the benchmark of a row has
TEXT_REWARDS = ("match", "math", "regex", "code", BENCHMARK)  # which fail by what a response says alone
SLOW = ("math", "regex", BENCHMARK)  # of these, what may take more than linear time: in a process that can be ended
HTTP = ("http://", "https://")
MOST_SCORE = 3.4e38
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
QUESTION = Path(__file__).with_name("judge.txt").read_text().rstrip()


def from_spec(spec: str, kinds: Mapping[str, Callable[..., Any]]) -> Any:
    """Return what `NAME`, `NAME=VALUE` or `NAME={"option": value, ...}` names among `kinds`; VALUE is its first option.
    Raises ValueError for another name, or for options that it does not take."""
    name, equals, value = spec.partition("=")
    if name not in kinds:
        raise ValueError(f"{spec}: {name} must be one of {', '.join(kinds)}")
    try:
        return kinds[name](**json.loads(value)) if value.startswith("{") else kinds[name](*[value] if equals else [])
    except (TypeError, ValueError, re.error, OSError) as error:
        raise ValueError(f"{spec}: {error}") from error


def check_sandbox(spec: str, allowed: str) -> None:
    """Raise ValueError where programs cannot be confined, unless they are allowed all the same."""
    if allowed not in ("", UNPROTECTED):
        raise ValueError(f"{spec}={allowed} must be {spec}, or {spec}={UNPROTECTED}")
    try:
        run_python("", unprotected=bool(allowed))
    except Unprotected as missing:
        raise ValueError(f"{missing}; {spec}={UNPROTECTED} runs them with the protections that there are") from missing


def match(prompt: str, response: str, answer: str) -> float:
    """Return 1 if the response is the answer up to surrounding whitespace, else 0."""
    return float(response.strip() == answer.strip())


@dataclass(frozen=True)
class MathEquality:
    """1 if the last formula of the response, in a box if it has one, equals the answer by math-verify, else 0."""

    def check(self) -> None:
        try:
            import math_verify  # noqa: F401
        except ImportError as error:
            raise ValueError(f"math needs the package math-verify: pip install usp-toolkit[math] ({error})") from error

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        from math_verify import parse, verify

        marked = any(mark in answer for mark in ("$", "\\boxed", "\\(", "\\["))
        right = parse(answer if marked else f"${answer}$")
        try:
            return float(verify(right, parse(response)))
        except Exception:  # of packages that read what a policy wrote: it is not the answer
            return 0.0


@dataclass(frozen=True)
class Pattern:
    """1 if a regular expression is found in the response; with a group, if the last it finds is the answer."""

    pattern: str

    def __post_init__(self) -> None:
        re.compile(self.pattern)

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        found = list(re.finditer(self.pattern, response, re.DOTALL | re.MULTILINE))
        if not found or not found[-1].re.groups:
            return float(bool(found))
        return float((found[-1][1] or "").strip() == answer.strip())


@dataclass(frozen=True)
class CodeTests:
    """The share of tests that the last block of Python code in the response passes, in the sandbox.

    The answer has the tests: a JSON list of {"input": ..., "output": ...}, standard input and output of a program up to
    whitespace at their ends, or statements that follow the code, such as assertions: one test.
    """

    allowed: str = ""
    seconds: float = 10.0

    def check(self) -> None:
        check_sandbox("code", self.allowed)

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        code = (BLOCK.findall(response) or [response])[-1]
        limits, unprotected = Limits(seconds=self.seconds), bool(self.allowed)
        try:
            tests = json.loads(answer)
        except ValueError:
            tests = None
        if not isinstance(tests, list) or not all(isinstance(test, dict) for test in tests):
            done = secrets.token_hex(8)  # without it, code that exits early would pass
            ran = run_python(f"{code}\n\n{answer}\n\nprint({done!r})\n", "", limits, unprotected)
            return float(ran.code == 0 and ran.output.rstrip().endswith(done))
        passed = 0
        for test in tests:
            ran = run_python(code, str(test["input"]), limits, unprotected)
            passed += ran.code == 0 and ran.output.rstrip() == str(test["output"]).rstrip()
        return passed / len(tests) if tests else 0.0


@dataclass(frozen=True)
class Server:
    """The number `score` in the JSON reply of an HTTP server to prompt, response and answer.

    Attributes:
        url: that the JSON object is posted to. timeout: seconds of a request. retries: further requests where one
            fails, or replies no number, after 1, 2, 4, ... seconds.
    """

    url: str = ""
    timeout: float = 60.0
    retries: int = 2
    pause: float = 1.0

    def __post_init__(self) -> None:
        if not self.url.startswith(HTTP):
            raise ValueError(f"the url {self.url} must begin with http:// or https://")

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        return self.tried(lambda: self._score(prompt, response, answer))

    def tried(self, ask: Callable[[], T]) -> T:
        """Return the result of a request, with retries. Raises ConnectionError if all fail, or Unscored as the last."""
        error: str | Unscored = ""
        for attempt in range(1 + self.retries):
            if attempt:
                time.sleep(self.pause * 2 ** (attempt - 1))
            try:
                return ask()
            except Unscored as failed:
                error = failed
            except FAULTS as failed:
                error = f"{type(failed).__name__}: {failed}"
        if isinstance(error, Unscored):
            raise error
        kind = " ".join(re.findall("[A-Z][a-z]+", type(self).__name__)).lower()
        times = f" {1 + self.retries} times" if self.retries else ""
        raise ConnectionError(f"the {kind} at {self.url} failed{times}: {error}")

    def _score(self, prompt: str, response: str, answer: str) -> float:
        sample = {"prompt": prompt, "response": response, "answer": answer}
        return finite(float(post(self.url, sample, self.timeout)["score"]))


@dataclass(frozen=True)
class Judge(Server):
    """The number in the last line of a model's reply, served by an OpenAI-compatible HTTP API.

    Attributes:
        url: of the API. question: with {prompt}, {response} and {answer}.
    """

    url: str = "http://127.0.0.1:8000/v1"
    model: str = ""
    question: str = QUESTION

    def _score(self, prompt: str, response: str, answer: str) -> float:
        texts = {"{prompt}": prompt, "{answer}": answer, "{response}": response}
        said = re.sub("|".join(map(re.escape, texts)), lambda name: texts[name[0]], self.question)
        body = {"model": self.model, "messages": [{"role": "user", "content": said}], "temperature": 0}
        reply = post(f"{self.url}/chat/completions", body, self.timeout)["choices"][0]["message"]["content"]
        try:
            return finite(float(reply.strip().splitlines()[-1]))
        except (ValueError, LookupError, AttributeError) as error:
            raise Unscored(f"the judge's reply ends without a number: {clean(str(reply), 200)!r}") from error


def finite(score: float) -> float:
    """Return a score; raise ValueError if it is not finite in float32."""
    if not abs(score) <= MOST_SCORE:
        raise ValueError(f"{score} is not finite in float32")
    return score


def post(url: str, body: Mapping[str, Any] | None, timeout: float, most: int = 1 << 20) -> Any:
    """Return the JSON reply, of `most` bytes, to a JSON request, or to one without a body. Raises OSError or ValueError
    without one."""
    read, until = bytearray(), time.monotonic() + timeout
    with posted(url, body, timeout) as reply:
        while len(read) < most and (piece := reply.read1(min(most - len(read), 1 << 16))):
            read += piece
            if time.monotonic() > until:
                raise TimeoutError(f"a reply takes longer than {timeout:g} seconds")
    try:
        return json.loads(read)
    except RecursionError as error:
        raise ValueError("its reply is nested too deeply") from error


@contextmanager
def posted(url: str, body: Mapping[str, Any] | None, timeout: float) -> Iterator[Any]:
    """Open the reply to a request as of `post`. Raises OSError without one."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout) as reply:
            yield reply
    except urllib.error.HTTPError as error:
        raise OSError(f"{error}: {error.read(1000).decode(errors='replace')}") from error


READY_REWARDS: Mapping[str, Callable[..., Callable[[str, str, str], float]]] = {
    "match": lambda: match,
    "math": MathEquality,
    "regex": Pattern,
    "code": CodeTests,
    "judge": Judge,
    "server": Server,
}


def score(reward: Callable[..., float], sample: Mapping[str, Any], response: str) -> float:
    """Return what a function of prompt, response and answer, or also of `row`, says of a response to a sample."""
    row = {"row": sample["row"]} if "row" in inspect.signature(reward).parameters else {}
    return reward(sample["prompt"], response, sample["answer"], **row)


class Scored:
    """An environment of one turn, which a reward function scores."""

    blames = REWARD_CODE  # if it fails

    def __init__(self, reward: Callable[[str, str, str], float]) -> None:
        self._reward = reward

    def reset(self, sample: Mapping[str, Any]) -> None:
        self._sample = sample

    def step(self, turn: str) -> tuple[None, float, bool]:
        return None, score(self._reward, self._sample, turn), True

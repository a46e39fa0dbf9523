"""Episodes of several turns: their settings, and the processes of their environments on the rank that asks them."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

Observation = str | list[dict[str, Any]]
LONGEST = 1 << 24  # bytes of an answer
WORKER = Path(__file__).with_name("worker.py")


class Environment(Protocol):
    """What answers a policy in one episode. A class that --environment names is called without arguments, in a process
    beside the ranks, once for every episode."""

    def reset(self, sample: Mapping[str, Any]) -> None:
        """Begin an episode: sample has the texts `prompt` and `answer` of the data, the number `prompt_index` of that
        example, and the number `sample` of the response in its step."""

    def step(self, turn: str) -> tuple[Observation | None, float, bool]:
        """Answer the text of the policy's turn with (observation, reward, done).

        The policy reads the observation: text as it is, or messages, such as {"role": "tool", "content": ...}, as the
        chat template writes them. None where the episode is done.
        """


class Answer(NamedTuple):
    """What an environment answered to a turn of the episode `number`; error: why it did not, empty if it did."""

    number: int
    observation: Observation | None = None
    reward: float = 0.0
    done: bool = True
    error: str = ""
    traceback: str = ""


@dataclass(eq=False)
class _Process:
    """A process that runs one episode at a time."""

    popen: subprocess.Popen[bytes]
    number: int = -1  # of the episode; -1: free
    until: float = 0.0  # when its answer is due
    read: bytearray = field(default_factory=bytearray)


class Processes:
    """Processes of an environment, one for every episode that runs: one that hangs or dies costs its own episode. None
    is started before it is asked.

    Args:
        environment: PATH.py:NAME of a class with the methods of `Environment`, or a ready one (`worker.make`) with its
            settings. timeout: seconds of a step.
    """

    def __init__(self, environment: str, timeout: float = 60.0, settings: Mapping[str, Any] | None = None) -> None:
        self._environment, self._timeout, self._settings = environment, timeout, json.dumps(settings or {})
        self._of_episode: dict[int, _Process] = {}
        self._free: list[_Process] = []
        self._lost: list[Answer] = []
        self._selector = selectors.DefaultSelector()

    def ask(self, number: int, turn: str, sample: Mapping[str, Any] | None) -> None:
        """Send a turn of an episode to its environment, which `sample` begins."""
        if sample is not None:
            for process in [process for process in self._free if process.popen.poll() is not None]:
                self._end(process, "it died between two episodes")
            self._of_episode[number] = self._free.pop() if self._free else self._start()
            self._of_episode[number].number = number
        process = self._of_episode[number]
        process.until = time.monotonic() + self._timeout
        asked = {"turn": turn} if sample is None else {"turn": turn, "sample": sample}
        assert process.popen.stdin is not None
        try:
            process.popen.stdin.write(json.dumps(asked).encode() + b"\n")
            process.popen.stdin.flush()
        except BrokenPipeError:
            self._lost.append(self._end(process, "its process has ended"))

    def end(self, number: int) -> None:
        """End an episode; its process takes another one."""
        if process := self._of_episode.pop(number, None):
            process.number = -1
            self._free.append(process)

    def answers(self, wait: bool) -> list[Answer]:
        """Return the answers that have come; `wait` for one at least, if there are episodes."""
        found, self._lost = self._lost, []
        while True:
            asked = [process for process in self._of_episode.values() if process.until]
            due = min((process.until for process in asked), default=0.0)
            left = max(0.0, due - time.monotonic()) if wait and not found else 0.0
            for key, _ in self._selector.select(left) if asked else ():
                found += self._receive(key.data)
            late = [process for process in asked if 0 < process.until < time.monotonic()]
            found += [self._end(each, f"a step took longer than {self._timeout:g} seconds") for each in late]
            if found or not wait or not asked:
                return found

    def answer_all(self, turns: Sequence[tuple[str, Mapping[str, Any]]], workers: int) -> list[Answer]:
        """Return the answers to episodes of one turn each, with their samples, in order; `workers` run at a time."""
        found: dict[int, Answer] = {}
        begun = 0
        while len(found) < len(turns):
            while begun < len(turns) and begun - len(found) < workers:
                self.ask(begun, *turns[begun])
                begun += 1
            for answer in self.answers(wait=True):
                found[answer.number] = answer
                self.end(answer.number)
        return [found[number] for number in range(len(turns))]

    def stop(self) -> None:
        """End the processes whose episodes run."""
        for process in list(self._of_episode.values()):
            self._end(process, "")

    def close(self) -> None:
        """End all processes."""
        for process in [*self._free, *self._of_episode.values()]:
            self._end(process, "")
        self._selector.close()

    def _start(self) -> _Process:
        command = [sys.executable, str(WORKER), self._environment, self._settings]
        pipe = subprocess.PIPE
        process = _Process(subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True))
        assert process.popen.stdout is not None
        self._selector.register(process.popen.stdout, selectors.EVENT_READ, process)
        return process

    def _receive(self, process: _Process) -> Iterator[Answer]:
        assert process.popen.stdout is not None
        piece = os.read(process.popen.stdout.fileno(), 1 << 16)
        process.read += piece
        if not piece:
            process.popen.wait()
            ended = self._end(process, f"its process ended with exit code {process.popen.returncode}")
            yield from [ended] if ended.number >= 0 else []
        elif len(process.read) > LONGEST:
            yield self._end(process, f"its answer is longer than {LONGEST:,} bytes")
        elif process.read.endswith(b"\n"):
            values, process.read, process.until = json.loads(process.read), bytearray(), 0.0
            yield Answer(process.number, **values)

    def _end(self, process: _Process, why: str) -> Answer:
        """Kill a process; return the answer to its episode."""
        assert process.popen.stdin is not None and process.popen.stdout is not None
        self._selector.unregister(process.popen.stdout)
        with suppress(ProcessLookupError):
            os.killpg(process.popen.pid, signal.SIGKILL)  # with what it has started
        process.popen.wait()
        process.until = 0.0
        if process in self._free:
            self._free.remove(process)
        for pipe in (process.popen.stdin, process.popen.stdout):
            with suppress(BrokenPipeError):  # where it had not read all
                pipe.close()
        self._of_episode.pop(process.number, None)
        return Answer(process.number, error=why)


@dataclass(frozen=True, eq=False)
class Episodes:
    """How the turns of responses are answered.

    Attributes:
        examples: with a prompt, ids, and an answer each, by prompt_index. decode: returns the text of ids.
        observe: returns the ids that the policy reads, of an observation and the last token before it. Raises
            ValueError for messages without a chat template.
        max_turns: of the policy.
        max_observation_tokens: of all observations of an episode, which ends before one that exceeds them.
        failure: the score of an episode whose environment fails: 0 (zero), or nan: the sample is no part of the step
            (drop), or the step must not train (stop).
        failures: the episodes that failed since the last `take_failures`.
        processes: of the environment, on the ranks that ask it; they take the episodes of one step after another.
    """

    processes: Processes
    examples: Any
    decode: Callable[[Sequence[int]], str]
    observe: Callable[[Observation, int], list[int]]
    max_turns: int = 8
    max_observation_tokens: int = 1024
    failure: Literal["stop", "zero", "drop"] = "stop"
    failures: list[dict[str, Any]] = field(default_factory=list)

    def sample(self, index: int) -> dict[str, Any]:
        """Return what `Environment.reset` gets of an example, besides the numbers of the sample and the example."""
        example = self.examples[index]
        return {"prompt": self.decode(example.prompt.tolist()), "answer": example.answer}

    def take_failures(self) -> list[dict[str, Any]]:
        """Return `failures`, and forget them."""
        taken = list(self.failures)
        self.failures.clear()
        return taken


def ids_between(encode: Callable[[str], Iterable[int]], chats: Any, observation: Observation, last: int) -> list[int]:
    """Return the ids that follow a turn that ended with the token `last`: of text, or of messages up to where the next
    turn begins, by a chat template (`usp.hf.tokenizers.ChatTemplate`), which may end the turn with the same token.
    Raises ValueError for messages without a template."""
    if isinstance(observation, str):
        return [int(token) for token in encode(observation)]
    if chats is None:
        raise ValueError("it answered with messages, and the tokenizer has no chat template: answer with text")
    ids = chats.between(observation).tolist()
    return ids[1:] if ids[:1] == [last] else ids

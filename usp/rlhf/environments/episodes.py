"""Episodes of several turns: their settings, and the processes of their environments on the rank that asks them.

A process is this file as a script, `python episodes.py NAME SETTINGS`: a JSON line for every turn in, one with the
answer out. It imports nothing but the standard library and the user's file, or what is ready, so that it starts fast.
What the environment prints goes to standard error."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[3])  # instead of this folder, whose files are no modules of the user's

from usp.rlhf.environments import outside
from usp.rlhf.environments.agents import AGENT, AgentEnvironment
from usp.rlhf.environments.benchmarks import REWARDS
from usp.rlhf.environments.outside import ENVIRONMENT, REWARD_CODE, TEXT, clean, one_line
from usp.rlhf.environments.ready_rewards import MOST_SCORE, REWARD, SLOW, TEXT_REWARDS, Scored, from_spec
from usp.rlhf.environments.sandbox import PDEATHSIG, call
from usp.rlhf.environments.tool_calls import calls_of
from usp.rlhf.environments.tools import NAME as TOOLS
from usp.rlhf.environments.tools import Toolbox, ToolEnvironment, tool_of

Observation = str | list[dict[str, Any]]
MOST_BYTES = 1 << 24  # of an answer
MEMORY = 8 << 30  # bytes of a process whose reward may take any number of them
CHARACTERS = 32  # of an observation for each token that it may have
TOOL_SHARE = 0.75  # of the seconds of a step, for what tools take


class Environment(Protocol):
    """What answers a policy in one episode. A class that --environment names is called without arguments, in a process
    beside the ranks, once for every episode."""

    def reset(self, sample: Mapping[str, Any]) -> None:
        """Begin an episode: sample has the texts `prompt` and `answer` of the data, the number `prompt_index` of that
        example, its `row` as the file has it, and the number `sample` of the response in its step."""

    def step(self, turn: str) -> tuple[Observation | None, float, bool]:
        """Answer the text of the policy's turn with (observation, reward, done).

        The policy reads the observation: text as it is, or messages, such as {"role": "tool", "content": ...}, as the
        chat template writes them. None where the episode is done.
        """
        ...


class Answer(NamedTuple):
    """What an environment answered to a turn of the episode `number`; error: why it did not, empty if it did; blame:
    whose fault that is, see `outside`."""

    number: int
    observation: Observation | None = None
    reward: float = 0.0
    done: bool = True
    error: str = ""
    traceback: str = ""
    blame: str = ""


@dataclass(eq=False)
class _Process:
    """A process that runs one episode at a time."""

    popen: subprocess.Popen[bytes]
    number: int = -1  # of the episode; -1: free
    ends: float = math.inf  # when the episode does
    until: float = 0.0  # when its answer is due
    read: bytearray = field(default_factory=bytearray)


class Processes:
    """Processes of an environment, one for every episode that runs: one that hangs or dies costs its own episode. None
    is started before it is asked.

    Args:
        environment: PATH.py:NAME of a class with the methods of `Environment`, or a ready one (`make`) with its
            settings. timeout: seconds of a step. seconds: of an episode; 0: no limit.
    """

    def __init__(self, environment: str, timeout: float = 60.0, settings: Any = None, seconds: float = 0.0) -> None:
        self._environment, self._timeout, self._seconds = environment, timeout, seconds or math.inf
        self._settings = json.dumps({"seconds": TOOL_SHARE * timeout, **(settings or {})})
        ready = environment in (TOOLS, REWARD) and (settings or {})["reward"].partition("=")[0] in TEXT_REWARDS
        by_text = ready or environment == AGENT
        self._blame = TEXT if by_text else REWARD_CODE if environment == REWARD else ENVIRONMENT  # if a process ends
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
            self._of_episode[number].ends = time.monotonic() + self._seconds
        process = self._of_episode[number]
        process.until = min(time.monotonic() + self._timeout, process.ends)
        asked = {"turn": turn} if sample is None else {"turn": turn, "sample": sample}
        assert process.popen.stdin is not None
        try:
            process.popen.stdin.write(json.dumps(asked).encode() + b"\n")
            process.popen.stdin.flush()
        except BrokenPipeError:
            self._lost.append(self._end(process, "its process has ended"))

    def keep(self, numbers: Collection[int]) -> None:
        """End the episodes but these, whose steps have their time from now on: nobody has listened to them."""
        self._lost = [each for each in self._lost if each.number in numbers]
        for number, process in [*self._of_episode.items()]:
            if number not in numbers:
                self._end(process, "")
            elif process.until:
                process.until = min(time.monotonic() + self._timeout, process.ends)

    def end(self, number: int) -> None:
        """End an episode; its process takes another one, but that of an agent, whose command may have left others."""
        if self._environment == AGENT and number in self._of_episode:
            self._end(self._of_episode[number], "")
        elif process := self._of_episode.pop(number, None):
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
            late, long = time.monotonic(), f"a step took longer than {self._timeout:g} seconds"
            for each in [process for process in asked if 0 < process.until < late]:
                ended = self._end(each, long)
                found.append(Answer(ended.number, done=False) if each.ends < late else ended)
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

    def close(self) -> None:
        """End all processes."""
        self.keep(())
        for process in [*self._free]:
            self._end(process, "")
        self._selector.close()

    def another(self) -> Processes:
        """Return others of the same environment, whose episodes have numbers of their own."""
        return Processes(self._environment, self._timeout, json.loads(self._settings), self._seconds)

    def _start(self) -> _Process:
        command = [sys.executable, __file__, self._environment, self._settings]
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
        elif len(process.read) > MOST_BYTES:
            yield self._end(process, f"its answer is longer than {MOST_BYTES:,} bytes")
        elif process.read.endswith(b"\n"):
            try:
                answer = Answer(process.number, **outside.read_json(process.read))
            except (ValueError, TypeError):
                yield self._end(process, "it wrote something else to the run than its answer")
            else:
                process.read, process.until = bytearray(), 0.0
                yield answer

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
        return Answer(process.number, error=why, blame=self._blame)


@dataclass(frozen=True, eq=False)
class Episodes:
    """How the turns of responses are answered.

    Attributes:
        examples: a prompt, ids, and an answer each, by prompt_index. decode: text of ids. show: with special tokens.
        observe: returns the ids that the policy reads, of an observation, the ids of the turn before it, and `chat` of
            the example. Raises ValueError for messages without a chat template.
        max_turns: of the policy.
        max_observation_tokens: of all observations of an episode, which ends before one that exceeds them.
        begin: of agents, returns the ids of the messages that begin a conversation, a `Chat`.
        failure: the score of an episode whose environment fails, see `score_of_failure`.
        failures: the episodes that failed since the last step was recorded.
        processes: of the environment, on the ranks that ask it; they take the episodes of one step after another.
    """

    processes: Processes
    examples: Any
    decode: Callable[[Sequence[int]], str]
    observe: Callable[[Observation, Sequence[int], Any], list[int]]
    max_turns: int = 8
    max_observation_tokens: int = 1024
    begin: Any = None
    show: Callable[[Sequence[int]], str] | None = None
    failure: Literal["stop", "zero", "drop"] = "stop"
    failures: list[dict[str, Any]] = field(default_factory=list)

    def written(self, ids: Sequence[int]) -> str:
        """Return the text of a turn, with special tokens where some families mark calls of tools by these."""
        text, shown = self.decode(ids), self.show(ids) if self.show else ""
        return shown if not calls_of(text) and calls_of(shown) else text

    def sample(self, index: int) -> dict[str, Any]:
        """Return what `Environment.reset` gets of an example, besides the numbers of the sample and the example."""
        example = self.examples[index]
        texts = {"prompt": self.decode(example.prompt.tolist()), "answer": example.answer}
        return {**texts, "row": json.loads(example.row) if example.row else texts}

    def exceeds(self, observation: Observation) -> bool:
        """Return whether an observation is too long for its tokens to be counted: `CHARACTERS` for each of them."""
        text = observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
        return len(text) > CHARACTERS * self.max_observation_tokens


def score_of_failure(failure: str, blame: str) -> float:
    """Return the score of a sample that failed: 0 (zero), or nan: it is no part of the step (drop), or the step must
    not train (stop), unless the policy's own text is to blame, which scores 0 then."""
    return 0.0 if failure == "zero" or (blame == TEXT and failure == "stop") else math.nan


def ids_between(
    encode: Callable[[str], Iterable[int]], chats: Any, observation: Observation, turn: Sequence[int], chat: Any = None
) -> list[int]:
    """Return the ids that follow a turn of these ids: of text, or of messages up to where the next turn begins, by a
    chat template (`usp.hf.tokenizers.ChatTemplate`), whose ending of a turn is not repeated. chat: what the template
    was given for the prompt. Raises ValueError for messages without a template."""
    if isinstance(observation, str):
        return [int(token) for token in encode(observation)]
    if chats is None:
        raise ValueError("it answered with messages, and the tokenizer has no chat template: answer with text")
    return [int(token) for token in chats.between(observation, turn, chat)]


# In the process of an environment


def make(name: str, settings: dict[str, Any]) -> Callable[[], Any]:
    """Return what makes the environment of an episode: the class that PATH.py:NAME names, or a ready one."""
    if name not in (TOOLS, REWARD, AGENT):
        return load(name)
    reward = settings["reward"]
    if reward.partition("=")[0] in SLOW:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    score = from_spec(reward, REWARDS) if reward.partition("=")[0] in REWARDS else load(reward)
    if name == REWARD:
        return lambda: Scored(score)
    if name == AGENT:
        return lambda: AgentEnvironment(settings["agent"], score)
    toolbox = Toolbox([tool_of(spec, load) for spec in settings["tools"]], settings["schemas"])
    return lambda: ToolEnvironment(toolbox, score, settings["chat"], settings["seconds"])


def load(name: str) -> Any:
    """Return what PATH.py:NAME names."""
    path, _, of_class = name.rpartition(":")
    spec = importlib.util.spec_from_file_location("environment", Path(path).expanduser())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up annotations there
    spec.loader.exec_module(module)
    return getattr(module, of_class)


def checked(returned: Any) -> dict[str, Any]:
    """Return what a step returned as JSON values; raise ValueError for anything but (observation, reward, done)."""
    if not (isinstance(returned, tuple) and len(returned) == 3):
        raise ValueError(f"step returned {returned!r:.200}, expected (observation, reward, done)")
    observation, reward, done = returned
    messages = isinstance(observation, list) and all(isinstance(each, dict) and "role" in each for each in observation)
    if not (isinstance(observation, str) or messages or (observation is None and done)):
        raise ValueError(f"the observation {observation!r:.200} must be text, or a list of messages")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= MOST_SCORE:
        raise ValueError(f"the reward {reward!r:.200} must be a finite number")
    most = outside.LONGEST if isinstance(observation, str) else outside.LONGEST // max(1, len(observation or ()))
    return {"observation": outside.cleaned(observation, most), "reward": float(reward), "done": bool(done)}


def main() -> None:
    """Answer until there are no more lines. A line with a sample begins an episode."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if sys.platform == "linux":
        call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # with the rank, also in the middle of a step
    kind: Any = None
    environment: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if "sample" in asked:
                kind = kind or make(sys.argv[1], json.loads(sys.argv[2]))
                environment = kind()
                environment.reset(asked["sample"])
            answer = checked(environment.step(asked["turn"]))
        except (Exception, SystemExit) as error:
            blame = TEXT if isinstance(error, outside.Unscored) else getattr(environment, "blames", ENVIRONMENT)
            answer = {"error": f"it raised {one_line(error)}", "traceback": clean(traceback.format_exc())}
            answer["blame"] = blame
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

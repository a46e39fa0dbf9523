"""The processes of environments: what a fault costs, and what is between two turns."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import ByT5Tokenizer

from usp.data.tokenizer import ByteTokenizer
from usp.hf.tokenizers import ChatTemplate
from usp.rlhf.environments.episodes import Answer, Processes, checked, ids_between
from usp.rlhf.environments.outside import read_json

FILE = Path(__file__).with_name("answers.py")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HANGS = ("hang", "fork")
FAULTS = {
    "die": "its process ended with exit code 7",
    "reward": "the reward nan must be a finite number",
    "shape": "step returned 'one thing', expected (observation, reward, done)",
    "raise": "it raised KeyError: 'no such thing'",
}


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes(f"{FILE}:Faults", 600.0)
    yield made
    made.close()


def answer(processes: Processes, numbers: set[int]) -> dict[int, Answer]:
    """The answers to episodes that have been asked."""
    found: dict[int, Answer] = {}
    while set(found) != numbers:
        found |= {each.number: each for each in processes.answers(wait=True)}
    return found


@pytest.mark.slow
def test_a_fault_costs_its_own_episode(processes: Processes) -> None:
    kinds = [*FAULTS, "print", ""]
    for number, fault in enumerate(kinds):
        processes.ask(number, "a turn", {"answer": fault})
    every = set(range(len(kinds)))
    assert set(answer(processes, every).values()) == {Answer(n, "go on", 1.0, False) for n in every}
    for number in every:
        processes.ask(number, "another", None)
    for number, found in answer(processes, every).items():
        if fault := FAULTS.get(kinds[number]):
            assert fault in found.error and ("in step" in found.traceback) == (kinds[number] == "raise")
        else:
            assert found == (number, *(("", 2.0, True) if kinds[number] else ("go on", 1.0, False)), "", "", "")


@pytest.mark.slow
def test_what_takes_too_long_is_ended(processes: Processes) -> None:
    for number, fault in enumerate(HANGS):
        processes.ask(number, "a turn", {"answer": fault})
    assert all(found.reward == 1 for found in answer(processes, {0, 1}).values())
    processes._timeout = 0.5
    for number in range(len(HANGS)):
        processes.ask(number, "another", None)
    assert {found.error for found in answer(processes, {0, 1}).values()} == {"a step took longer than 0.5 seconds"}
    assert not processes._of_episode


@pytest.mark.slow
def test_a_process_takes_one_episode_after_another(processes: Processes) -> None:
    for number in range(3):
        processes.ask(number, "a turn", {"answer": ""})
        assert answer(processes, {number})[number].reward == 1
        processes.end(number)
    assert len(processes._free) == 1
    (process,) = processes._free
    processes.ask(9, "a turn", {"answer": "hang"})
    processes.ask(10, "a turn", {"answer": ""})
    assert answer(processes, {9, 10})[9].reward == 1
    processes.end(10)
    processes.keep(())  # as at the end of a step: the free one stays for the next
    assert not processes._of_episode and len(processes._free) == 1
    (process,) = processes._free
    os.kill(process.popen.pid, 9)
    process.popen.wait()
    processes.ask(3, "a turn", {"answer": ""})
    assert answer(processes, {3})[3].reward == 1


@pytest.mark.parametrize("levels", [70, 5000, 200_000])
def test_an_observation_of_many_levels_is_refused_before_it_is_rendered(levels: int) -> None:
    deep: Any = "deep"
    for _ in range(levels):
        deep = [deep]
    observation = [{"role": "tool", "content": deep}]
    with pytest.raises(ValueError, match="nested more than 64 levels deep"):
        checked((observation, 0.0, False))
    with pytest.raises(ValueError, match="nested more than 64 levels deep"):  # of a process, which may write anything
        read_json("[" * levels + "]" * levels)


def test_an_observation_of_as_many_levels_as_pass_is_rendered_or_refused() -> None:
    deep: Any = "deep"
    for _ in range(60):
        deep = [deep, {"a": "</s>"}]
    observation = checked(([{"role": "tool", "content": "42", "more": deep}], 0.0, False))["observation"]
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = CHATML
    chats = ChatTemplate(tokenizer, "bytes", stops=(1,))
    assert chats.between(observation).tolist() == chats.between([{"role": "tool", "content": "42"}]).tolist()
    with pytest.raises(ValueError, match="message 3 has parts that are not text"):
        chats.between([{"role": "tool", "content": deep}])


def test_ids_between_turns() -> None:
    tokenizer, messages = ByteTokenizer(), [{"role": "tool", "content": "42"}]
    assert ids_between(tokenizer.encode, None, "42", [5]) == tokenizer.encode("42").tolist()
    with pytest.raises(ValueError, match="has no chat template: answer with text"):
        ids_between(tokenizer.encode, None, messages, [5])
    written = ByT5Tokenizer()
    written.chat_template = CHATML
    chats = ChatTemplate(written, "bytes", stops=(1,))
    following = tokenizer.encode("\n<|im_start|>tool\n42").tolist()
    following += [1, *tokenizer.encode("\n<|im_start|>assistant\n").tolist()]
    assert ids_between(tokenizer.encode, chats, messages, [5, 1]) == following  # the turn ended with </s> itself
    assert ids_between(tokenizer.encode, chats, messages, [5]) == [1, *following]

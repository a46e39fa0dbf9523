"""What policies and tools may write: anything, and it ends no episode but their own, and no run."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.usp.rlhf.environments import hostile
from tests.usp.rlhf.environments.test_episodes import answer
from tests.usp.rlhf.environments.test_tools import call
from usp.data.tokenizer import ByteTokenizer
from usp.rlhf.algorithms.rewards import ScoreWith
from usp.rlhf.environments.episodes import Answer, Episodes, Processes, checked, score_of_failure
from usp.rlhf.environments.outside import LONGEST, TEXT, Unscored, clean, cleaned, read_json
from usp.rlhf.environments.tool_calls import FORMATS, ToolCall, calls_of
from usp.rlhf.environments.tools import MOST_CALLS, Toolbox, ToolEnvironment
from usp.rlhf.records import turns_of

FILE = Path(__file__).with_name("answers.py")


def test_a_clean_text_is_bounded_and_can_be_encoded() -> None:
    assert clean("a\ud83db\udc00") == "a\ufffdb\ufffd" and clean("\ud83d\ude00") == "\U0001f600"
    assert clean("0123456789", 4) == "01\n[6 characters left out]\n89"
    assert read_json('{"\\ud83d": ["\\udc00", 1, null]}') == {"\ufffd": ["\ufffd", 1, None]}
    for text in ("[" * 1200, "[" * 65 + "]" * 65, "[" * 10**6, "NaN", "1e999", "{", "9" * 5000, ""):
        with pytest.raises(ValueError, match=r"."):
            read_json(text)
    for value in (float("inf"), {1}, b"x"):
        with pytest.raises(ValueError, match=r"."):
            cleaned(value)


def tools(reward: Any = lambda *texts: 0.5, **options: Any) -> ToolEnvironment:
    made = ToolEnvironment(Toolbox(["calculator", f"search={Path(__file__).parent}"]), reward, True, **options)
    made.reset({"prompt": "", "answer": ""})
    return made


def read(observation: Any, episodes: Episodes) -> list[int]:
    """What a rank does with an observation, up to its tokens."""
    if episodes.exceeds(observation):
        return []
    texts = [observation] if isinstance(observation, str) else [str(each) for each in observation]
    return [token for text in texts for token in ByteTokenizer().encode(text).tolist()]


@pytest.fixture
def episodes() -> Episodes:
    return Episodes(Processes("none.py:None"), (), str, lambda observation, last: [])


@pytest.mark.parametrize("chat", [True, False])
def test_no_turn_of_a_policy_fails_its_environment(chat: bool, episodes: Episodes, exhaustive: bool) -> None:
    draw, environment, slowest = random.Random(7 + chat), tools(), 0.0
    environment._chat = chat
    for _ in range(2000 if exhaustive else 25):
        turn = hostile.turn(draw)
        begin = time.process_time()
        returned = checked(environment.step(turn))
        sent = Answer(0, **read_json(json.dumps(returned)))
        read(sent.observation or "", episodes)
        (record,) = turns_of([0], [1], [0.0], lambda ids, turn=turn: turn)
        json.dumps(record["calls"], ensure_ascii=False).encode()
        assert (sent.observation is None) == (not calls_of(turn))
        slowest = max(slowest, time.process_time() - begin)
    print(f"slowest turn: {slowest:.2f} CPU seconds")


def test_no_answer_of_a_tool_fails_its_environment(episodes: Episodes, exhaustive: bool) -> None:
    draw, refused, slowest = random.Random(3), 0, 0.0
    for _ in range(2000 if exhaustive else 25):
        returned = hostile.answer(draw)
        begin = time.process_time()
        try:
            sent = Answer(0, **read_json(json.dumps(checked(returned))))
        except ValueError:  # no text, but what an environment itself must not return
            observation, reward, _ = returned
            numbers = isinstance(reward, int | float) and abs(reward) <= 1
            assert not numbers or not isinstance(observation, str)
            assert not numbers or not isinstance(observation[0]["content"], str)
            refused += 1
            continue
        assert len(json.dumps(sent)) < 1 << 24
        read(sent.observation, episodes)
        slowest = max(slowest, time.process_time() - begin)
    print(f"slowest answer: {slowest:.2f} CPU seconds; {refused} refused")


def test_the_calls_of_a_turn_are_bounded_in_number_and_seconds() -> None:
    turn = call("calculator", expression="1 + 1") * 100
    answers, *_ = tools().step(turn)
    assert answers and len(answers) == MOST_CALLS and "the other 84 calls" in answers[-1]["content"]  # type: ignore[index]
    late, *_ = tools(seconds=0.0).step(turn)
    assert late and {each["content"] for each in late[:-1]} == {"Error: no time is left for it in this turn"}  # type: ignore[index,union-attr]
    for marker in (*FORMATS, "<tool_call><function=f>", '{"name":"f","parameters":', " to=functions.f" + " " * 90):
        for again in ("", "x", "<parameter=x>", "<arg_key>x</arg_key><arg_value>", "{}", '"', marker):
            assert len(calls_of(marker + again * 10**4)) <= 10**4 + 1  # in linear time
    (code,) = calls_of('<tool_call>{"name": "python", "arguments": {"code": "<tool_call>"}}</tool_call>')
    assert code == ToolCall("python", {"code": "<tool_call>"})


def test_a_page_of_any_length_is_cut_before_it_is_sent_and_read(episodes: Episodes) -> None:
    processes = Processes(f"{FILE}:Faults", 600.0)
    try:
        processes.ask(0, "a turn", {"answer": "long"})
        answer(processes, {0})
        processes.ask(0, "another", None)
        found = answer(processes, {0})[0]
    finally:
        processes.close()
    assert isinstance(found.observation, str) and LONGEST < len(found.observation) < LONGEST + 100 and not found.error
    assert episodes.exceeds(found.observation) and not episodes.exceeds("x" * 32 * 1024)


@pytest.mark.slow
def test_what_a_response_says_scores_0_and_stops_nothing(tmp_path: Path) -> None:
    pool = Processes("reward", 1.5, {"reward": r"regex=(a|aa)+\Z"})
    function = ScoreWith(
        lambda *_: 1.0, lambda ids: "a" * 60 + "b", lambda index: "", pool=pool, failure="stop", retries=2
    )
    try:
        from tests.usp.rlhf.algorithms.test_rewards import make

        scores = function(make().of([4]), lambda x: x)["score"]
    finally:
        pool.close()
    (record,) = function.failures
    assert scores == [torch.tensor(0.0)] and record["blame"] == TEXT and "took longer than 1.5 s" in record["error"]

    def judge(prompt: str, response: str, answer: str) -> float:
        raise Unscored("no number \ud83d" + "x" * 10**6)

    function = ScoreWith(judge, str, str, failure="stop")
    assert function(make().of([4]), lambda x: x)["score"] == [torch.tensor(0.0)]
    (record,) = function.failures
    assert len(record["error"]) < 3000 and record["error"].encode()
    assert [score_of_failure(failure, TEXT) for failure in ("stop", "zero")] == [0.0, 0.0]
    assert all(each != each for each in (score_of_failure("drop", TEXT), score_of_failure("stop", "reward")))


def test_the_environment_or_the_reward_is_to_blame(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def broken(prompt, response, answer):\n    raise KeyError('\\ud83d')\n")
    settings = {"tools": ["calculator"], "reward": f"{reward}:broken", "chat": False}
    for processes, turn, blame in (
        (Processes("tools", 600.0, settings), "no call", "reward"),
        (Processes(f"{FILE}:Faults", 600.0), "a turn", "environment"),
    ):
        try:
            processes.ask(0, turn, {"prompt": "", "answer": "raise"})
            found = answer(processes, {0})[0]
            if not found.error:
                processes.ask(0, turn, None)
                found = answer(processes, {0})[0]
        finally:
            processes.close()
        assert found.blame == blame and "KeyError" in found.error

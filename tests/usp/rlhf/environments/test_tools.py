"""The ready environment: what is called, what is answered, and what is said of a call that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.usp.rlhf.environments.test_episodes import answer
from tests.usp.rlhf.environments.test_sandbox import needs_protection
from usp.rlhf.environments.episodes import Processes
from usp.rlhf.environments.tool_calls import ToolCall, calls_of
from usp.rlhf.environments.tools import PassageSearch, Toolbox, ToolEnvironment, ToolFailed, calculate


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 * 7", 84),
        (" (3 + 4) * -2 ", -14),
        ("7 / 2", 3.5),
        ("10 / 5", 2),
        ("2 ** 10 // 3 % 100", 41),
        ("sqrt(16) + max(1, 2, pi * 0)", 6),
        ("round(2.6) + floor(1.5) - abs(-3)", 1),
        ("9" * 900, int("9" * 900)),
    ],
)
def test_a_calculator_calculates(expression: str, value: float) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("2 +", "SyntaxError"),
        ("9 ** 9 ** 9", "a power is too large"),
        ("10 ** 1000 * 10 ** 1000", "the result is too large"),
        ("(-8) ** 0.5", "the result is not real"),
        ("exp(1e9)", "OverflowError"),
        ("round(1, 1000000000)", "TypeError"),
        ("__import__('os').getpid()", "it knows numbers"),
        ("x + 1", "it knows numbers"),
        ("'a' * 9", "it knows numbers"),
        ("[1 for _ in (1,)]", "it knows numbers"),
        ("(" * 400 + ")" * 400, "Error"),
        ("1 +" * 400, "at most 1,000"),
    ],
)
def test_a_calculator_refuses_the_rest(expression: str, said: str) -> None:
    with pytest.raises(ToolFailed, match=said):
        calculate(expression)


def test_search_finds_the_passages_with_rare_words(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("The cat sat on the mat.\n\nThe dog and the cat.\nA line more.\n\n\nNothing here.")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.jsonl").write_text('{"text": "zebra cat"}\n{"text": "the the the"}\n')
    search = PassageSearch(str(tmp_path), results=2)
    assert search.best("zebra") == ['{"text": "zebra cat"}']
    assert search.best("CAT on") == ["The cat sat on the mat.", '{"text": "zebra cat"}']
    assert search.run({"query": "unicorn"}) == "(nothing found)"
    with pytest.raises(ValueError, match=r"has no \.txt, \.md or \.jsonl file with text"):
        PassageSearch(str(tmp_path / "none")).check()


def test_calls_of_a_turn() -> None:
    turn = f"Let me see. {call('a', x='1')}{call('b')} <tool_call>{{'name'</tool_call><tool_call>[1]</tool_call>"
    first, second, third, fourth = calls_of(turn)
    assert (first, second) == (ToolCall("a", {"x": "1"}), ToolCall("b", {}))
    assert "the call is not JSON" in third and 'must be {"name"' in fourth
    assert calls_of('<tool_call>{"name": "a", "arguments": {"code": "1\n2"}}') == [
        ToolCall("a", {"code": "1\n2"})
    ]  # no end
    assert calls_of("no call") == []


def environment(specs: list[str], chat: bool = True) -> ToolEnvironment:
    made = ToolEnvironment(Toolbox(specs), lambda prompt, response, answer: float(response == answer), chat)
    made.reset({"prompt": "", "answer": "84"})
    return made


def test_a_turn_with_calls_is_answered_and_one_without_ends_the_episode() -> None:
    tools = environment(["calculator"])
    found = tools.step(call("calculator", expression="12 * 7") + call("calculator", expression="1/0"))
    about = {"role": "tool", "name": "calculator"}
    messages = [
        {**about, "tool_call_id": "call00000", "content": "84"},
        {**about, "tool_call_id": "call00001", "content": "Error: ZeroDivisionError: division by zero"},
    ]
    assert found == (messages, 0.0, False)
    assert tools.step("84") == (None, 1.0, True) and tools.step("85") == (None, 0.0, True)
    text, *_ = environment(["calculator"], chat=False).step(call("calculator", expression="1 + 1"))
    assert text == "\n<tool_response>\n2\n</tool_response>\n"


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        (call("calculate", expression="1"), "there is no function 'calculate', only calculator"),
        (call("calculator"), "calculator: expression is missing"),
        (call("calculator", expression=1), "calculator: expression must be text"),
        (call("calculator", expression="1", digits="2"), "calculator: digits is not a parameter"),
        ("<tool_call>calculator(1)</tool_call>", "the call is not JSON"),
    ],
)
def test_what_is_wrong_with_a_call_is_its_answer(turn: str, said: str) -> None:
    observation, reward, done = environment(["calculator"]).step(turn)
    assert observation and said in observation[0]["content"] and (reward, done) == (0.0, False)  # type: ignore[index]


@needs_protection
@pytest.mark.slow
def test_programs_of_a_policy_cost_their_episode_alone() -> None:
    programs = {
        "print(6 * 7)": "42",
        "import time; time.sleep(99)": "it took longer than 2 seconds",
        "import ctypes; ctypes.string_at(0)": "it was ended by SIGSEGV",
        f"open({str(Path(__file__))!r})": "FileNotFoundError",
        "x = 1": "(it printed nothing)",
    }
    for program, said in programs.items():
        limits = json.dumps({"seconds": 2 if "sleep" in program else 60, "output": 1000})
        (message,), _, done = environment([f"python={limits}"]).step(call("python", code=program))  # type: ignore[misc]
        assert said in message["content"] and not done


def test_specs_that_name_nothing_are_refused(tmp_path: Path) -> None:
    for spec, said in {
        "calc": "calc must be one of python, calculator, search$",
        "calculator=1": "takes no arguments",
        'search={"folder": "x"}': "unexpected keyword argument",
    }.items():
        with pytest.raises(ValueError, match=said):
            Toolbox([spec])
    with pytest.raises(ValueError, match="several tools have a function calculator"):
        Toolbox(["calculator", "calculator"]).check()
    with pytest.raises(ValueError, match="python=maybe must be python, or python=unprotected"):
        Toolbox(["python=maybe"]).check()


def test_the_process_of_an_environment_runs_the_tools(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def half(prompt, response, answer):\n    return len(prompt + response + answer) / 2\n")
    settings = {"tools": ["calculator"], "reward": f"{reward}:half", "chat": False}
    processes = Processes("tools", 600.0, settings)
    try:
        processes.ask(0, call("calculator", expression="2 * 3"), {"prompt": "p", "answer": "a"})
        assert answer(processes, {0})[0].observation == "\n<tool_response>\n6\n</tool_response>\n"
        processes.ask(0, "6", None)
        assert answer(processes, {0})[0] == (0, None, 1.5, True, "", "", "")
    finally:
        processes.close()

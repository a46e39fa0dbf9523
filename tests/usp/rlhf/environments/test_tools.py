"""The ready environment: what is called, what is answered, and what is said of a call that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.tools import calculate
from tests.usp.rlhf.environments.test_episodes import answer
from tests.usp.rlhf.environments.test_sandbox import needs_protection
from usp.hf.tokenizers import function_schema
from usp.rlhf.environments.episodes import Processes
from usp.rlhf.environments.tool_calls import ToolCall, calls_of
from usp.rlhf.environments.tools import PYTHON, Python, Toolbox, ToolEnvironment, tool_of

CALCULATOR = Toolbox([calculate], [function_schema(calculate, "")])


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_calls_of_a_turn() -> None:
    turn = f"Let me see. {call('a', x='1')}{call('b')} <tool_call>{{'name'</tool_call><tool_call>[1]</tool_call>"
    first, second, third, fourth = calls_of(turn)
    assert (first, second) == (ToolCall("a", {"x": "1"}), ToolCall("b", {}))
    assert "the call is not JSON" in third and 'must be {"name"' in fourth
    assert calls_of('<tool_call>{"name": "a", "arguments": {"code": "1\n2"}}') == [
        ToolCall("a", {"code": "1\n2"})
    ]  # no end
    assert calls_of("no call") == []


def environment(toolbox: Toolbox = CALCULATOR, chat: bool = True) -> ToolEnvironment:
    made = ToolEnvironment(toolbox, lambda prompt, response, answer: float(response == answer), chat)
    made.reset({"prompt": "", "answer": "84"})
    return made


def test_a_turn_with_calls_is_answered_and_one_without_ends_the_episode() -> None:
    tools = environment()
    found = tools.step(call("calculate", expression="12 * 7") + call("calculate", expression="1/0"))
    about = {"role": "tool", "name": "calculate"}
    messages = [
        {**about, "tool_call_id": "call00000", "content": "84"},
        {**about, "tool_call_id": "call00001", "content": "Error: ZeroDivisionError: division by zero"},
    ]
    assert found == (messages, 0.0, False)
    assert tools.step("84") == (None, 1.0, True) and tools.step("85") == (None, 0.0, True)
    text, *_ = environment(chat=False).step(call("calculate", expression="1 + 1"))
    assert text == "\n<tool_response>\n2\n</tool_response>\n"


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        (call("calc", expression="1"), "there is no function 'calc', only calculate"),
        (call("calculate"), "calculate: expression is missing"),
        (call("calculate", expression=1), "calculate: expression must be text"),
        (call("calculate", expression="1", digits="2"), "calculate: digits is not a parameter"),
        ("<tool_call>calculator(1)</tool_call>", "the call is not JSON"),
    ],
)
def test_what_is_wrong_with_a_call_is_its_answer(turn: str, said: str) -> None:
    observation, reward, done = environment().step(turn)
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
        python = Python(seconds=2 if "sleep" in program else 60, output=1000)
        (message,), _, done = environment(Toolbox([python], [PYTHON])).step(call("python", code=program))  # type: ignore[misc]
        assert said in message["content"] and not done


def test_tools_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="unexpected keyword argument"):
        tool_of('python={"folder": "x"}', str)
    with pytest.raises(ValueError, match="python=maybe must be python, or python=unprotected"):
        tool_of("python=maybe", str).check()  # type: ignore[attr-defined]
    for function, why in ((lambda x: x, "no docstring"), (print, "missing a type hint"), (1, "is not a module")):
        with pytest.raises(ValueError, match=f"my.py:f needs types, and a docstring.*{why}"):
            function_schema(function, "my.py:f")  # type: ignore[arg-type]


def test_the_process_of_an_environment_runs_the_tools(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def half(prompt, response, answer):\n    return len(prompt + response + answer) / 2\n")
    tool = f"{Path(calculate.__code__.co_filename)}:calculate"
    settings = {"tools": [tool], "schemas": CALCULATOR.schemas, "reward": f"{reward}:half", "chat": False}
    processes = Processes("tools", 600.0, settings)
    try:
        processes.ask(0, call("calculate", expression="2 * 3"), {"prompt": "p", "answer": "a"})
        assert answer(processes, {0})[0].observation == "\n<tool_response>\n6\n</tool_response>\n"
        processes.ask(0, "6", None)
        assert answer(processes, {0})[0] == (0, None, 1.5, True, "", "", "")
    finally:
        processes.close()

"""Rewards by name, and the processes that call slow ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.harness.json_api import JsonHandler
from tests.usp.rlhf.algorithms.test_rewards import make, score_with
from tests.usp.rlhf.environments.test_sandbox import needs_protection
from usp.rlhf.algorithms.rewards import load_reward_function
from usp.rlhf.environments.episodes import Processes
from usp.rlhf.environments.outside import Unscored
from usp.rlhf.environments.ready_rewards import CodeTests, Judge, Pattern, match
from usp.rlhf.graph import Reduce


def test_match_and_patterns() -> None:
    assert match("", " 4 \n", "4") == 1 and match("", "5", "4") == 0
    answers = Pattern(r"Answer: (\S+)")
    assert answers("", "Answer: 3\nAnswer: 4", "4") == 1 and answers("", "Answer: 4\nAnswer: 3", "4") == 0
    assert answers("", "4", "4") == 0
    assert Pattern(r"^OK$")("", "so\nOK\n", "") == 1 and Pattern(r"^OK$")("", "not OK", "") == 0


@pytest.mark.slow
def test_mathematical_equality() -> None:
    pytest.importorskip("math_verify")
    equal = load_reward_function("math")
    for response, answer, right in (
        (r"So it is $\frac{1}{2}$.", "0.5", 1),
        (r"\boxed{\frac{2}{4}}", r"\frac12", 1),
        (r"$x^2 + 2x + 1$", r"$(x+1)^2$", 1),
        ("The answer is 7", "8", 0),
        ("no idea", "8", 0),
    ):
        assert equal("", response, answer) == right, response


@needs_protection
@pytest.mark.slow
def test_code_is_tested_in_the_sandbox() -> None:
    reward = CodeTests(seconds=20.0)
    block = "Like this:\n```python\n{}\n```\nDone."
    asserts = "assert double(2) == 4\nassert double('a') == 'aa'"
    assert reward("", block.format("def double(x):\n    return 2 * x"), asserts) == 1
    assert reward("", block.format("def double(x):\n    return x"), asserts) == 0
    assert reward("", block.format("import sys; sys.exit(0)"), asserts) == 0  # it runs no test
    cases = json.dumps([{"input": "2", "output": "4"}, {"input": "3", "output": "9"}])
    assert reward("", "print(int(input()) * 2)", cases) == 0.5


class Model(JsonHandler):
    """An HTTP API whose replies are the server's `replies`, one after another."""

    def do_POST(self) -> None:
        server: Any = self.server
        server.asked.append(self.asked())
        reply = server.replies[min(len(server.asked), len(server.replies)) - 1]
        said = {"choices": [{"message": {"content": reply}}]} if self.path.startswith("/v1/") else {"score": reply}
        self.reply(said, 200 if reply else 500)


@pytest.fixture
def model() -> Iterator[Any]:
    server: Any = HTTPServer(("127.0.0.1", 0), Model)
    server.asked, server.replies = [], ["0.5"]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_judge_replies_a_number(model: Any) -> None:
    url = f"http://127.0.0.1:{model.server_port}/v1"
    judge = load_reward_function(f"judge={json.dumps({'url': url, 'model': 'm', 'pause': 0.0})}")
    assert judge("{answer}?", "r", "a") == 0.5
    (asked,) = model.asked
    assert asked["model"] == "m" and "Prompt:\n{answer}?\n" in asked["messages"][0]["content"]
    model.replies = ["0.5", "", "I say\n0.75"]
    assert judge("p", "r", "a") == 0.75
    model.replies = ["Rather good, 9/10"]
    with pytest.raises(Unscored, match="the judge's reply ends without a number: 'Rather good, 9/10'"):
        judge("p", "r", "a")
    assert len(model.asked) == 6
    with pytest.raises(ConnectionError, match="failed: "):
        Judge("http://127.0.0.1:9/v1", retries=0)("p", "r", "a")


def test_a_server_replies_a_score(model: Any) -> None:
    url = f"http://127.0.0.1:{model.server_port}/scores"
    server = load_reward_function(f"server={json.dumps({'url': url, 'pause': 0.0})}")
    model.replies = ["", "-1.5"]
    assert server("p", "r", "a") == -1.5
    assert model.asked == [{"prompt": "p", "response": "r", "answer": "a"}] * 2
    model.replies = ["good"]
    with pytest.raises(ConnectionError, match=f"the server at {url} failed 3 times: ValueError"):
        server("p", "r", "a")


def test_names_are_checked() -> None:
    for name, said in {
        "regex=(": "missing ",
        "regex": "missing 1 required positional argument",
        "judge=model": "must begin with http",
        "server": "must begin with http",
        "exact": "must be PATH.py:NAME",
        "code=yes": "code=yes must be code, or code=unprotected",
    }.items():
        with pytest.raises(ValueError, match=said):
            load_reward_function(name)


def alone(x: Any) -> Any:
    return x


@pytest.mark.slow
def test_slow_functions_are_called_in_processes(tmp_path: Path) -> None:
    alone_: Reduce = alone
    file = tmp_path / "slow.py"
    file.write_text(
        "import os, pathlib, time\n"
        "def reward(prompt, response, answer):\n"
        "    tried = pathlib.Path(__file__).with_name(answer)\n"
        "    if answer in ('a', 'bb') and not tried.exists():\n"
        "        tried.touch()\n"
        "        os._exit(3)\n"
        "    if answer == 'bb':\n"
        "        time.sleep(600)\n"
        "    return len(response)\n"
    )
    pool = Processes("reward", 4.0, {"reward": f"{file}:reward"})
    try:
        function = score_with(lambda *_: 1 / 0, pool=pool, workers=2, retries=1, pause=0.0, failure="zero")
        assert [float(score) for score in function(make(), alone_)["score"]] == [5.0, 2.0, 0.0]
        (record,) = function.failures
        assert (record["sample"], record["error"]) == (9, "a step took longer than 4 seconds")
        assert len(pool._free) <= 2 and not pool._of_episode
    finally:
        pool.close()

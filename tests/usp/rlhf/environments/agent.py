"""Agents of tests, without a client: `python agent.py KIND` asks the endpoint as the row on its standard input says."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Messages = list[dict[str, Any]]


def post(path: str, body: Any, key: str = "") -> Any:
    """The reply to a request, or the code and the message of its refusal."""
    headers = {"Authorization": f"Bearer {key or os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}{path}", data, headers)
    try:
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)["error"]["message"]


def ask(messages: Messages, **options: Any) -> dict[str, Any]:
    reply = post("/chat/completions", {"model": "any", "messages": messages, **options})
    if isinstance(reply, tuple):
        raise ConnectionError(reply[1])
    return reply["choices"][0]["message"]


def user(content: str) -> Messages:
    return [{"role": "user", "content": content}]


def tree(turns: int) -> float:
    """Conversations of that many turns: one by one, two that go on from the first, two at a time, and one whose history
    is written anew."""
    trunk = user("Begin.")
    trunk.append(ask(trunk))
    lines = [[*trunk, *user(f"line {number}")] for number in range(2)]
    lines += [user("Another."), [*user("Begin."), {"role": "assistant", "content": "rewritten"}, *user("line 0")]]

    def go_on(messages: Messages) -> None:
        for number in range(turns):
            messages.append(ask(messages, max_tokens=3 if number == 1 else None))
            messages += user(f"and {number}?")

    go_on(lines[0])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(go_on, lines[1:3]))
    go_on(lines[3])
    return turns


def linear(turns: int) -> None:
    """The environment `Numbers` of answers.py, to the end of the episode."""
    messages, reward = [*ROW["prompt"]], 0.0
    for number in range(1, turns + 1):
        reply = ask(messages)
        reward += len(reply["content"]) / 4
        post("/reward", {"reward": reward})
        messages += [reply, *user(f"[{number}]")]
        if len(reply["content"]) == 3:
            break


def refusals() -> list[Any]:
    hello = {"messages": user("Hello.")}
    return [
        post("/chat/completions", hello, key="another"),
        post("/chat/completions", b"{"),
        post("/chat/completions", {**hello, "n": 2}),
        post("/chat/completions", {**hello, "stop": ["x"]}),
        post("/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        post("/chat/completions", {"messages": "text"}),
        post("/completions", {"prompt": ["one", "two"]}),
        post("/completions", {"prompt": "one", "echo": True, **hello}),
        post("/embeddings", hello),
        post("/reward", {"reward": "much"}),
    ]


ROW = json.loads(sys.stdin.readline()) if __name__ == "__main__" else {}

if __name__ == "__main__":
    kind, _, value = (ROW.get("kind") or sys.argv[1]).partition("=")
    if kind == "tree":
        print("some words\n" + json.dumps({"reward": tree(int(value))}))
    elif kind == "linear":
        linear(int(value))
    elif kind == "refusals":
        print(json.dumps({"refusals": refusals()}), file=sys.stderr)
        said = refusals()
        ask(user("\n".join(f"{code} {message}" for code, message in said)))
    elif kind == "scored":
        ask(user("What?"))
    elif kind == "endless":
        messages = user("On.")
        while True:
            messages += [ask(messages), *user("on")]
    elif kind == "hang":
        ask(user("Hm."))
        time.sleep(1000)
    elif kind == "crash":
        ask(user("Hm."))
        raise ValueError("after a reply")
    elif kind == "early":
        raise ValueError("before a reply")
    elif kind == "tools":
        tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
        messages = user("1 + 2?")
        messages.append(ask(messages, tools=[tool]))
        (called,) = messages[-1]["tool_calls"]
        arguments = json.loads(called["function"]["arguments"])
        messages.append({"role": "tool", "tool_call_id": called["id"], "content": str(sum(arguments.values()))})
        print(json.dumps({"reward": float(ask(messages, tools=[tool])["content"] == "3")}))

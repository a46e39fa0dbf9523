"""An agent that knows only the client of an OpenAI-compatible server: rlhf.py trains its model.

Its model works at a terminal, which takes a character at a time. A letter runs a tool, and its result is what the model
reads next. The reward is the share of its turns that ran one: a sixth of all tokens are letters."""

import json
import sys

from openai import OpenAI

TURNS = 2


def tool(command: str) -> str:
    """Return what the tool prints; empty for what is no command."""
    return f"{command}: done" if len(command) == 1 and "@" <= command <= "\x7f" else ""


def play(client: OpenAI, question: str) -> float:
    """Return the reward of an episode."""
    messages: list = [{"role": "user", "content": question}]
    ran = 0
    for _ in range(TURNS):
        reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        printed = tool(reply.content or "")
        ran += bool(printed)
        messages += [reply, {"role": "user", "content": printed or "?"}]
    return ran / TURNS


if __name__ == "__main__":
    row = json.loads(sys.stdin.readline())
    print(json.dumps({"reward": play(OpenAI(), row["prompt"][0]["content"])}))

"""An agent that knows only the client of an OpenAI-compatible server: rlhf.py trains its model.

Its model works at a terminal, which takes a character at a time: a letter runs the tool, which looks the question up,
and what is no letter answers. Half of the reward is for each, in this order."""

import json
import sys

from openai import OpenAI


def play(client: OpenAI, question: str) -> float:
    """Return the reward of an episode."""
    messages: list = [{"role": "user", "content": question}]
    reward = 0.0
    for wanted in ("letter", "no letter"):
        reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        typed = reply.content or ""
        letter = len(typed) == 1 and "@" <= typed <= "\x7f"
        other = len(typed) == 1 and typed < "@"
        reward += 0.5 * (letter if wanted == "letter" else other)
        messages += [reply, {"role": "user", "content": "found" if letter else "?"}]
    return reward


if __name__ == "__main__":
    row = json.loads(sys.stdin.readline())
    print(json.dumps({"reward": play(OpenAI(), row["prompt"][0]["content"])}))

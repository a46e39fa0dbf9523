"""An agent with a tool, which knows only the client of an OpenAI-compatible server: rlhf.py trains its model.

It asks the model for the value under a key, and looks up the key that the model calls its tool with."""

import json
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "Return the value under a key.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


def play(client: OpenAI, key: str, table: dict[str, str]) -> float:
    """Return the reward of an episode."""
    messages: list = [{"role": "user", "content": key}]
    for _ in range(3):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0].message  # type: ignore[list-item]
        messages.append(reply)
        if not reply.tool_calls:
            return float(reply.content == table[key])
        for call in reply.tool_calls:
            arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
            found = table.get(str(arguments.get("key")), "?")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return 0.0


if __name__ == "__main__":
    row = json.loads(sys.stdin.readline())
    print(json.dumps({"reward": play(OpenAI(), row["messages"][0]["content"], row["table"])}))

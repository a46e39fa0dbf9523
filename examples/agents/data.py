"""Write demonstrations for agent.py, most of them wrong: python data.py ROWS SHARE > FILE. A model that imitates them
uses the right key, and repeats what it is told, in that share of its episodes each."""

import json
import random
import sys

ROWS, SHARE = int(sys.argv[1]), float(sys.argv[2])
draw = random.Random(0)
for _ in range(ROWS):
    table = {str(key): draw.choice("abcdefghij") for key in range(10)}
    asked = str(draw.randrange(10))
    key = asked if draw.random() < SHARE else str(draw.randrange(10))
    answer = table[key] if draw.random() < SHARE else draw.choice("abcdefghij")
    call = {"type": "function", "function": {"name": "get", "arguments": {"key": key}}}
    messages = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": table[key]},
        {"role": "assistant", "content": answer},
    ]
    print(json.dumps({"messages": messages, "table": table}))

"""The task of agent.py as an environment: the same episodes, without a client."""

import json
import re


class Lookup:
    """A row's table, of which the policy looks a key up."""

    def reset(self, sample: dict) -> None:
        self.key, self.table = sample["row"]["messages"][0]["content"], sample["row"]["table"]
        self.turns = 0

    def step(self, turn: str) -> tuple[list | None, float, bool]:
        self.turns += 1
        calls = re.findall("<tool_call>(.*?)</tool_call>", turn, re.DOTALL)
        try:
            keys = [str(json.loads(call)["arguments"].get("key")) for call in calls]
        except (ValueError, LookupError, TypeError, AttributeError):
            keys = []
        if not keys or self.turns == 3:
            return None, float(not keys and turn == self.table[self.key]), True
        return [{"role": "tool", "content": self.table.get(key, "?")} for key in keys], 0.0, False

"""The task of agent.py as an environment: the same episodes, without a client."""


class Terminal:
    """A terminal that wants a letter, and then none."""

    def reset(self, sample: dict) -> None:
        self.turns = 0

    def step(self, turn: str) -> tuple[list, float, bool]:
        self.turns += 1
        letter = len(turn) == 1 and "@" <= turn <= "\x7f"
        other = len(turn) == 1 and turn < "@"
        reward = 0.5 * (letter if self.turns == 1 else other)
        return [{"role": "user", "content": "found" if letter else "?"}], reward, self.turns == 2

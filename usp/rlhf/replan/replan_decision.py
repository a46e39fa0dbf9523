"""Whether another plan is worth what it costs to change to it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from usp.rlhf.plan.plan import ExecutionPlan


@dataclass(frozen=True)
class SwitchCost:
    """What it takes to run the next step under another plan.

    Attributes:
        nbytes: of weights and optimizer states that ranks send each other.
        move_seconds: in which they are sent.
        build_seconds: in which models are built, and ranks get ready.
        search_seconds: in which the plan was searched, which are spent in either case.
    """

    nbytes: int = 0
    move_seconds: float = 0.0
    build_seconds: float = 0.0
    search_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """What is yet to spend."""
        return self.move_seconds + self.build_seconds


@dataclass(frozen=True)
class Decision:
    """Two plans for the steps that remain.

    Attributes:
        step: after which it is taken. remaining: number of steps that follow.
        best: the plan to change to. why_not: why it cannot run, whatever it would gain.
        running_seconds, best_seconds: predicted for a step of the running plan, and of the best.
        gain: the least part of a step's time that is worth a change.
    """

    step: int
    remaining: int
    best: ExecutionPlan
    running_seconds: float
    best_seconds: float
    cost: SwitchCost
    gain: float
    why_not: str = ""

    @property
    def relative_gain(self) -> float:
        """The part of a step's time that the best plan saves."""
        return 1 - self.best_seconds / self.running_seconds if self.running_seconds else 0.0

    @property
    def saved_seconds(self) -> float:
        """What the change saves over the steps that remain, without what it costs."""
        return self.remaining * (self.running_seconds - self.best_seconds)

    @property
    def switches(self) -> bool:
        return not self.verdict

    @property
    def verdict(self) -> str:
        """Why the running plan stays; empty if it does not."""
        if self.why_not:
            return self.why_not
        if self.best_seconds >= self.running_seconds:
            return "no faster plan is found"
        if self.relative_gain < self.gain:
            return f"a step would be {self.relative_gain:.1%} faster, and {self.gain:.1%} is asked for"
        if self.saved_seconds <= self.cost.seconds:
            return f"the change takes {self.cost.seconds:.2f} s and saves {self.saved_seconds:.2f} s"
        return ""

    def line(self) -> str:
        """Return the decision with its figures."""
        found = (
            f"replan after step {self.step}: a step takes {self.running_seconds:.3f} s by prediction, and "
            f"{self.best_seconds:.3f} s with the best plan ({self.relative_gain:.1%} less); {self.remaining} steps "
            f"remain, and the change moves {self.cost.nbytes / 2**20:.1f} MiB in {self.cost.seconds:.2f} s"
        )
        return f"{found}: {self.verdict or 'changing the plan'}"

    def metrics(self) -> dict[str, float]:
        """Return the figures for the record of the step."""
        return {
            "replan/running_seconds": self.running_seconds,
            "replan/best_seconds": self.best_seconds,
            "replan/switch_bytes": float(self.cost.nbytes),
            "replan/switch_seconds": self.cost.seconds,
            "replan/search_seconds": self.cost.search_seconds,
            "replan/switched": float(self.switches),
        }

"""The process of an environment: a JSON line for every turn in, one with the answer out.

It is started as a script, `python worker.py NAME SETTINGS`, and imports nothing but the standard library and the user's
file, or what is ready, so that it starts fast. What the environment prints goes to standard error."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[3])  # instead of this folder, whose files are no modules of the user's

from usp.rlhf.environments.ready_rewards import READY_REWARDS, REWARD, Scored, from_spec
from usp.rlhf.environments.sandbox import PDEATHSIG, call
from usp.rlhf.environments.tools import NAME as TOOLS
from usp.rlhf.environments.tools import Toolbox, ToolEnvironment


def make(name: str, settings: dict[str, Any]) -> Callable[[], Any]:
    """Return what makes the environment of an episode: the class that PATH.py:NAME names, or a ready one."""
    if name not in (TOOLS, REWARD):
        return load(name)
    reward = settings["reward"]
    score = from_spec(reward, READY_REWARDS) if reward.partition("=")[0] in READY_REWARDS else load(reward)
    if name == REWARD:
        return lambda: Scored(score)
    toolbox = Toolbox(settings["tools"])
    return lambda: ToolEnvironment(toolbox, score, settings["chat"])


def load(name: str) -> Any:
    """Return what PATH.py:NAME names."""
    path, _, of_class = name.rpartition(":")
    spec = importlib.util.spec_from_file_location("environment", Path(path).expanduser())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up annotations there
    spec.loader.exec_module(module)
    return getattr(module, of_class)


def checked(returned: Any) -> dict[str, Any]:
    """Return what a step returned as JSON values; raise ValueError for anything but (observation, reward, done)."""
    if not (isinstance(returned, tuple) and len(returned) == 3):
        raise ValueError(f"step returned {returned!r:.200}, expected (observation, reward, done)")
    observation, reward, done = returned
    messages = isinstance(observation, list) and all(isinstance(each, dict) and "role" in each for each in observation)
    if not (isinstance(observation, str) or messages or (observation is None and done)):
        raise ValueError(f"the observation {observation!r:.200} must be text, or a list of messages")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ValueError(f"the reward {reward!r:.200} must be a finite number")
    return {"observation": observation, "reward": float(reward), "done": bool(done)}


def main() -> None:
    """Answer until there are no more lines. A line with a sample begins an episode."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if sys.platform == "linux":
        call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # with the rank, also in the middle of a step
    kind: Any = None
    environment: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if "sample" in asked:
                kind = kind or make(sys.argv[1], json.loads(sys.argv[2]))
                environment = kind()
                environment.reset(asked["sample"])
            answer = checked(environment.step(asked["turn"]))
        except (Exception, SystemExit) as error:
            answer = {"error": f"it raised {type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

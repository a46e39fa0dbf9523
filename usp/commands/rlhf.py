"""rlhf.py: train a language model with RLHF."""

from __future__ import annotations

from collections.abc import Callable

from usp.rlhf.config import RlhfConfig
from usp.run.launch import Launch
from usp.run.signals import StopRequest

from .command import Command


def _load() -> Callable[[RlhfConfig, Launch, StopRequest, str | None], None]:
    from usp.rlhf.trainer import train_rlhf

    return train_rlhf


main = Command("rlhf.py", RlhfConfig, _load).main

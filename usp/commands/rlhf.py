"""rlhf.py: train a language model with RLHF."""

from __future__ import annotations

from importlib import import_module

from usp.rlhf.config import RlhfConfig

from .command import Command

program = Command("rlhf.py", RlhfConfig, lambda: import_module("usp.rlhf.trainer").train_rlhf)
main = program.main

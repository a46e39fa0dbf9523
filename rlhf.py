"""Train a language model with RLHF, with a parallel layout for each model call. See `python rlhf.py --help`."""

from __future__ import annotations

from usp.commands.rlhf import script

if __name__ == "__main__":
    script()

"""Train a language model with Ulysses x Ring sequence parallelism. See `python train.py --help`."""

from __future__ import annotations

from usp.commands.train import script

if __name__ == "__main__":
    script()

"""Train a language model with Ulysses x Ring sequence parallelism. See `python train.py --help`."""

from __future__ import annotations

import os
import sys

from usp.commands.train import main
from usp.run.launch import leave

if __name__ == "__main__":
    leave(main(sys.argv[1:], os.environ))

"""Train a language model with RLHF, with a parallel layout for each model call. See `python rlhf.py --help`."""

from __future__ import annotations

import os
import sys

from usp.commands.rlhf import main
from usp.run.launch import leave

if __name__ == "__main__":
    leave(main(sys.argv[1:], os.environ))

"""Train a language model with RLHF, every call of a model in a layout of its own. See `python rlhf.py --help`."""

from __future__ import annotations

import os
import sys

from usp.rlhf.cli import main

if __name__ == "__main__":
    exit_code = main(sys.argv[1:], os.environ)
    if exit_code:
        os._exit(exit_code)  # at once: an orderly exit may wait for connections to ranks that are gone

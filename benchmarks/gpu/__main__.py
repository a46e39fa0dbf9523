"""Flags of `python -m benchmarks.gpu`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from benchmarks.gpu.runner import Options, run
from benchmarks.gpu.sections import SECTIONS


def options_of(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="One GPU: every figure beside what was expected. Sections that ended well are not run again.",
        epilog="sections: " + "; ".join(f"{s.name} ({s.seconds:.0f} s): {s.what}" for s in SECTIONS),
    )
    parser.add_argument("--output", type=Path, help="folder of all results (default: runs/gpu, or runs/gpu-tiny)")
    parser.add_argument("--sections", nargs="+", default=[], metavar="NAME", help="only these")
    parser.add_argument("--minutes", type=float, help="run the sections that fit into this time, and stop at its end")
    parser.add_argument("--again", action="store_true", help="also run sections that have ended well")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu only with --tiny")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to rehearse the code")
    args = parser.parse_args(arguments)
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu is for a rehearsal on toy sizes: add --tiny")
    output = args.output or Path("runs/gpu-tiny" if args.tiny else "runs/gpu")
    return Options(output, args.device, args.tiny, args.minutes, tuple(args.sections), args.again)


def main() -> None:
    options = options_of()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which kills the section that is running
    try:
        sys.exit(run(SECTIONS, options))
    except ValueError as error:
        sys.exit(f"benchmarks.gpu: {error}")


if __name__ == "__main__":
    main()

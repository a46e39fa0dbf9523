"""The tests marked `gpu`, with pytest's own report."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .setup import Setup, on_device

ROOT = Path(__file__).parents[2]
FILES = ("tests/attention/test_kernels.py", "tests/usp/rlhf/generation/test_graphs.py")


@on_device
def marked(setup: Setup) -> Iterator[tuple[str, float] | str]:
    """Run them; the report with whole tracebacks is in log.txt, results by test in junit.xml."""
    report = setup.folder / "junit.xml"
    options = ["-o", "addopts=--strict-markers", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "gpu", "-rfEs", "-v"]
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *FILES]
    code = subprocess.run(command, cwd=ROOT).returncode
    if not report.exists():
        raise RuntimeError(f"pytest ended with exit code {code} and without a report: see log.txt")
    counts: Counter[str] = Counter()
    for case in xml.parse(report).getroot().iter("testcase"):
        marks = {child.tag for child in case} & {"failure", "error", "skipped"}
        counts["failed" if marks & {"failure", "error"} else "skipped" if marks else "passed"] += 1
    yield "tests marked gpu that failed", float(counts["failed"])
    yield "exit code of pytest", float(code)
    yield "tests marked gpu that passed", float(counts["passed"])
    yield f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"

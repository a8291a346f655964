"""The tests that are marked `gpu`, as a part of the table."""

from __future__ import annotations

import subprocess
import sys

from tests.gpu.row import Row

COMMAND = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]


def run() -> Row:
    """Runs them, one after the other; what pytest prints goes to standard error."""
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None
        said = ""
        for line in ran.stdout:
            print(line, end="", file=sys.stderr)
            said = line.strip() or said
    return verdict(ran.returncode, said)


def verdict(code: int, summary: str) -> Row:
    """The row that pytest's exit code and last line make; on a GPU a skipped test is a failure."""
    passed = code == 0 and "skipped" not in summary
    return Row("tests marked gpu", "passed" if passed else "failed", summary)

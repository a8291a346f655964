"""Tests as parts of the table: those marked `gpu`, and the contracts of scripts with models on the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tests.gpu.row import Row

MARKED = ("-m", "gpu")
FILES = (
    *("tests/contract/test_awkward.py", "tests/contract/test_scripts.py"),
    "tests/system/test_every_change.py",
)
SCRIPTS = ("-m", "not differing", *FILES)
ON_GPU = {"HUBRING_TEST_DEVICE": "cuda"}


def run(part: str, chosen: Sequence[str], variables: Mapping[str, str] = ON_GPU) -> Row:
    """Runs the chosen tests; what pytest prints goes to standard error."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}) as ran:
        assert ran.stdout is not None
        said = ""
        for line in ran.stdout:
            print(line, end="", file=sys.stderr)
            said = line.strip() or said
    return verdict(part, ran.returncode, said)


def verdict(part: str, code: int, summary: str) -> Row:
    """The row that pytest's exit code and last line make; on a GPU a skipped test is a failure."""
    passed = code == 0 and "skipped" not in summary
    return Row(part, "passed" if passed else "failed", summary)

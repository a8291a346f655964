"""What a test needs beyond what `make test` installs; `.ci/run` installs it, and runs these tests then."""

from __future__ import annotations

import os

import pytest

REQUIRED = os.environ.get("HUBRING_PACKAGES") == "required"
"""Where all of it should be there: what lacks it fails, rather than be skipped."""


def needs(there: object, what: str, mend: str) -> list[pytest.MarkDecorator]:
    """Marks of a test that is skipped where something is not `there`, saying what, and how to get it."""
    return [
        pytest.mark.packages,
        pytest.mark.skipif(not there and not REQUIRED, reason=f"no {what} here: {mend}"),
    ]


def do_without(text: str) -> None:
    """Ends a test, or a fixture, that found out only now that something is missing."""
    if REQUIRED:
        pytest.fail(text)
    pytest.skip(text)

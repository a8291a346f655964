"""What a test needs beyond what `make test` installs; `.ci/run` installs it, and runs these tests then."""

from __future__ import annotations

import pytest


def needs(there: object, what: str, mend: str) -> list[pytest.MarkDecorator]:
    """Marks of a test that is skipped where something is not `there`, saying what, and how to get it."""
    return [pytest.mark.packages, pytest.mark.skipif(not there, reason=f"no {what} here: {mend}")]

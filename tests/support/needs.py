"""Tests that need packages which `make test` does not install. `.ci/run` installs them."""

from __future__ import annotations

import os

import pytest

REQUIRED = os.environ.get("HUBRING_PACKAGES") == "required"
"""Whether a test without its packages fails instead of being skipped."""


def needs(there: object, what: str, fix: str) -> list[pytest.MarkDecorator]:
    """Returns the marks of a test that is skipped if `there` is false; `fix` is the command to install it."""
    return [
        pytest.mark.packages,
        pytest.mark.skipif(not there and not REQUIRED, reason=f"no {what} on this host: {fix}"),
    ]


def do_without(text: str) -> None:
    """Skips a test or fixture that finds at run time that a package is missing; fails if all are required."""
    if REQUIRED:
        pytest.fail(text)
    pytest.skip(text)

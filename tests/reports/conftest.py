"""Marks the tests that fail today."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from tests.reports.known_failures import KNOWN, RACES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name, _, parameters = item.name.partition("[")
        if "tests/reports/" not in item.nodeid or name not in KNOWN:
            continue
        reason, patterns = KNOWN[name]
        if any(fnmatchcase(parameters.removesuffix("]"), pattern) for pattern in patterns.split()):
            item.add_marker(pytest.mark.xfail(strict=name not in RACES, reason=reason))

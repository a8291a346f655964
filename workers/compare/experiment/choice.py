"""Rows by the names that `--rows` gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from hubring.ps.core.errors import UsageError

_Row = TypeVar("_Row")


def chosen(names: Iterable[str], rows: Mapping[str, _Row]) -> list[_Row]:
    """The rows of these names, in this order.

    Raises:
        UsageError: No row has that name, or one is named twice.
    """
    found: dict[str, _Row] = {}
    for name in names:
        if name not in rows:
            raise UsageError(f"--rows: there is no row {name!r}; there are {', '.join(rows)}")
        if name in found:
            raise UsageError(f"--rows names {name} twice")
        found[name] = rows[name]
    return list(found.values())

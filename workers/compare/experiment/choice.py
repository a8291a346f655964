"""Selects rows by the names in `--rows`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from hubring.ps.core.errors import UsageError

_Row = TypeVar("_Row")


def chosen(names: Iterable[str], rows: Mapping[str, _Row]) -> list[_Row]:
    """Returns the rows with these names, in this order.

    Raises:
        UsageError: No row has that name, or a name occurs twice.
    """
    found: dict[str, _Row] = {}
    for name in names:
        if name not in rows:
            raise UsageError(f"--rows: no row {name!r}; expected one of {', '.join(rows)}")
        if name in found:
            raise UsageError(f"--rows names {name} twice")
        found[name] = rows[name]
    return list(found.values())

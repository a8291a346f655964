"""Quantities with units: `1gbit`, `5ms`."""

from __future__ import annotations

import re

from hubring.ps.core.errors import UsageError

_NUMBER = re.compile(r"([0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*([a-z]*)")
_RATES = {"": 1.0, "bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def rate(value: object) -> float:
    """Returns bits per second from a number, or from text in the spelling of tc, such as `200mbit`.

    Raises:
        UsageError: The value is neither.
    """
    return _read(value, _RATES, "a rate in bits per second, such as 200mbit, 1gbit or 1000000000")


def seconds(value: object) -> float:
    """Returns seconds from a number, or from text with a unit, such as `5ms`.

    Raises:
        UsageError: The value is neither.
    """
    return _read(value, _TIMES, "a time, such as 5ms, 100us, 2s or 0.005")


def _read(value: object, units: dict[str, float], allowed: str) -> float:
    match = _NUMBER.fullmatch(str(value).strip().lower())
    if match is None or match[2] not in units or isinstance(value, bool):
        raise UsageError(f"{value!r}: expected {allowed}")
    return float(match[1]) * units[match[2]]

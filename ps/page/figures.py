"""How numbers are written on the page."""

from __future__ import annotations

NOTHING = "–"
"""Stands where there is nothing to tell yet."""


def number(value: float) -> str:
    """Three significant digits, and no exponent where it can be read without."""
    if abs(value) >= 999.5:
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.2e}"
    return f"{value:.3g}"


def loss(value: float | None) -> str:
    """A loss, with four significant digits."""
    return NOTHING if value is None else f"{value:.4g}"


def size(count: float) -> str:
    """Bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration(seconds: float) -> str:
    """Whole seconds, minutes and hours: the two largest that are not 0."""
    whole = int(seconds)
    parts = [
        (whole // 86400, "d"),
        (whole // 3600 % 24, "h"),
        (whole // 60 % 60, "min"),
        (whole % 60, "s"),
    ]
    first = next((index for index, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count) or "0 s"

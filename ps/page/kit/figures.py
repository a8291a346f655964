"""How numbers are written for people."""

from __future__ import annotations

import math

NOTHING = "–"
"""Stands where there is no number."""


def number(value: float) -> str:
    """Three significant digits, and no exponent where it can be read without."""
    if abs(value) >= 999.5:
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.2e}"
    return f"{value:.3g}"


def loss(value: float | None) -> str:
    """A loss, with four significant digits."""
    return NOTHING if value is None else f"{value:.4g}"


def digits(value: float, count: int = 3) -> str:
    """As many significant digits as asked for, zeros too, and no exponent where it can be read without."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    scale = math.floor(math.log10(abs(value)))
    if not -5 <= scale <= 11:
        return f"{value:.{count - 1}e}"
    rounded = round(value, count - 1 - scale)
    return f"{rounded:,.{max(0, count - 1 - scale)}f}"


def grouped(count: int) -> str:
    """A whole number, with a comma before every three digits."""
    return f"{count:,}"


def size(count: float) -> str:
    """Bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def percent(share: float) -> str:
    """A relative number as people say it."""
    return f"{100 * share:.1f} %" if abs(share) < 0.0995 else f"{100 * share:.0f} %"


def signed(share: float) -> str:
    """A relative difference, with its sign as printers set it."""
    return f"{'−' if share < 0 else '+'}{percent(abs(share))}"


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


def coordinate(value: float) -> str:
    """To a hundredth: no eye sees more, and the page stays small."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def share(value: float) -> str:
    """A coordinate as a share of the drawing."""
    return f"{coordinate(100.0 * value)}%"

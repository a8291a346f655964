"""Formats numbers for people."""

from __future__ import annotations

import math

NOTHING = "–"
"""The text for a missing number."""


def number(value: float) -> str:
    """Formats three significant digits, without an exponent below 1e15."""
    if abs(value) >= 999.5:
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.2e}"
    return f"{value:.3g}"


def loss(value: float | None) -> str:
    """Formats a loss with four significant digits."""
    return NOTHING if value is None else f"{value:.4g}"


def digits(value: float, count: int = 3) -> str:
    """Formats `count` significant digits, with trailing zeros; an exponent only for extreme values."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    scale = math.floor(math.log10(abs(value)))
    if not -5 <= scale <= 11:
        return f"{value:.{count - 1}e}"
    rounded = round(value, count - 1 - scale)
    return f"{rounded:,.{max(0, count - 1 - scale)}f}"


def grouped(count: int) -> str:
    """Formats a whole number with thousands separators."""
    return f"{count:,}"


def size(count: float) -> str:
    """Formats bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def percent(share: float) -> str:
    """Formats a fraction as a percentage."""
    return f"{100 * share:.1f} %" if abs(share) < 0.0995 else f"{100 * share:.0f} %"


def signed(share: float) -> str:
    """Formats a relative difference as a percentage with a typographic sign."""
    return f"{'−' if share < 0 else '+'}{percent(abs(share))}"


def duration(seconds: float) -> str:
    """Formats a duration with its two largest units, from days to whole seconds."""
    whole = int(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    first = next((index for index, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count) or "0 s"


def coordinate(value: float) -> str:
    """Formats a coordinate with at most two decimals, which keeps the page small."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def share(value: float) -> str:
    """Formats a fraction of the chart as a percentage coordinate."""
    return f"{coordinate(100.0 * value)}%"

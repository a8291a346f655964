"""How far rows that agreed in their first steps are apart at the end, in words."""

from __future__ import annotations

import math

from hubring.workers.compare.result.findings import Gate


def drift(gate: Gate) -> str:
    """Returns a sentence with every row's largest difference; empty if nothing was compared at the end.

    Rows can have different references, for example if the first one diverged with some seed.
    """
    agreed = [pair for pair in gate.pairs if pair.limit and pair.steps and pair.passed and not pair.advice]
    worst: dict[str, dict[str, float]] = {}
    for pair in agreed:
        rows = worst.setdefault(pair.first, {})
        rows[pair.second] = max(rows.get(pair.second, 0.0), float(pair.final), key=_with_nan_last)
    if not worst:
        return ""
    found = "; ".join(f"from {reference}: {_differences(rows)}" for reference, rows in worst.items())
    return (
        f"End drift, the largest differences after the last step, {found}. After {agreed[0].steps} steps rows"
        " must agree; later, training amplifies rounding."
    )


def _with_nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _differences(rows: dict[str, float]) -> str:
    return ", ".join(f"{name} {apart:.2g}" for name, apart in rows.items())

"""On which devices rows have trained: speeds of different devices are not comparable."""

from __future__ import annotations

from collections.abc import Iterable

from hubring.workers.compare.result.setting_text import listed
from hubring.workers.compare.run.outcome import Outcome


def device(outcome: Outcome) -> str:
    """Returns where the parameters of a run were, `cpu` or `cuda`; empty if no worker recorded it."""
    found = {result["device"] for result in outcome.results if result and result.get("device")}
    return ", ".join(sorted(found))


def differing(outcomes: Iterable[Outcome]) -> str | None:
    """Returns why no speed is shown if not all rows have trained on the same devices."""
    rows: dict[str, dict[str, None]] = {}
    for outcome in outcomes:
        if place := device(outcome):
            rows.setdefault(place, {})[outcome.run.row.name] = None
    if len(rows) < 2:
        return None
    places = "; ".join(f"{listed(list(names))} on {place}" for place, names in rows.items())
    return (
        f"rows trained on different devices ({places}), so their speeds are not comparable; move the model"
        " and every batch to hubring.device() in every row"
    )

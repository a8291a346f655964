"""How speed goes with workers and servers: the crossover of hub and ring, and samples by workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workers.compare.cost.formulas import needed_servers

Entry = Mapping[str, Any]
"""A setting or a row, as in `results.json`."""

FORMULA = "k > n^2/(2(n-1))"
"""Servers k from which on the hub beats the ring with n workers, all links alike and bytes all that counts:
a ring moves 2(n-1)/n of the model each way in a step, a server max(1, n/k)."""


def servers_needed(workers: int) -> int | None:
    """The fewest servers with which the hub wins by the formula; None where it cannot: alone, or in a tie."""
    # Beyond k = n a worker's own link is the limit, and both then move as much only with n = 2.
    return None if workers <= 2 else math.floor(needed_servers(workers)) + 1


def crossovers(settings: Sequence[Entry], rows: Sequence[Entry]) -> list[dict[str, Any]]:
    """Where the hub begins to win, for settings that differ in servers only and have a link."""
    found = []
    for group in _groups(settings, "servers"):
        if len(group) < 2 or not group[0]["link"]:
            continue
        wins = [
            setting["servers"]
            for setting in group
            if (times := _pair(rows, setting["key"])) is not None and times[0] < times[1]
        ]
        found.append(
            {
                "setting": group[0]["key"].replace(f" k{group[0]['servers']}", ""),
                "tried": [setting["servers"] for setting in group],
                "measured": min(wins, default=None),
                "predicted": servers_needed(group[0]["workers"]),
                "modelled": None,
                "formula": FORMULA,
            }
        )
    return found


def scaling(settings: Sequence[Entry], rows: Sequence[Entry]) -> list[dict[str, Any]]:
    """Samples a second by workers, for the first settings that differ in workers only."""
    groups = [group for group in _groups(settings, "workers") if len(group) > 1]
    if not groups:
        return []
    names = list(dict.fromkeys(row["row"] for row in rows))
    return [
        {
            "row": name,
            "workers": [setting["workers"] for setting in groups[0]],
            "measured": [_median(rows, setting["key"], name, "samples_per_second") for setting in groups[0]],
            "predicted": [None] * len(groups[0]),
        }
        for name in names
    ]


def _groups(settings: Iterable[Entry], axis: str) -> list[list[Entry]]:
    """Settings that are the same but for one field."""
    groups: dict[str, list[Entry]] = {}
    for setting in settings:
        rest = {name: value for name, value in setting.items() if name not in (axis, "key")}
        groups.setdefault(repr(rest), []).append(setting)
    return [sorted(group, key=lambda setting: setting[axis]) for group in groups.values()]


def _pair(rows: Sequence[Entry], setting: str) -> tuple[float, float] | None:
    """Step times of hub and ring."""
    hub, ring = (_median(rows, setting, name, "step_ms") for name in ("hub-bsp", "ring"))
    return None if hub is None or ring is None else (hub, ring)


def _median(rows: Iterable[Entry], setting: str, row: str, name: str) -> float | None:
    for entry in rows:
        if (entry["setting"], entry["row"]) == (setting, row) and entry["numbers"][name] is not None:
            value: float = entry["numbers"][name]["median"]
            return value
    return None

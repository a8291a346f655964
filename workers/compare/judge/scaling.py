"""How speed goes with workers and servers: the crossover of hub and ring, and samples by workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hubring.workers.compare.cost.crossing import FORMULA, servers_needed
from hubring.workers.compare.result.ratio import ratio
from hubring.workers.compare.result.setting_text import without_servers

Entry = Mapping[str, Any]
"""A setting or a row, as in `results.json`."""


def crossovers(
    settings: Sequence[Entry], rows: Sequence[Entry], predict: Callable[[Entry], int | None] | None = None
) -> list[dict[str, Any]]:
    """Where the hub begins to win, for settings that differ in servers only and have a link.

    Args:
        settings: Of the results.
        rows: Measured in them; only settings in which both hub-bsp and the ring were count.
        predict: From how many servers on the hub wins in a setting; None: no model was calibrated.

    Returns:
        For each: the `setting` without servers, the numbers of them that were `tried`, and from how many on
        the hub wins: `measured`, `predicted` if a model is `calibrated`, and `by_bytes` alone, which is by
        `formula`. None: with none.
    """
    found = []
    for group in _groups(settings, "servers"):
        wins = {each["servers"]: won for each in group if (won := _wins(rows, each["key"])) is not None}
        if len(wins) < 2 or not group[0]["link"] or group[0]["fault"]:
            continue
        found.append(
            {
                "setting": without_servers(group[0]["key"]),
                "tried": list(wins),
                "measured": _from_on(wins),
                "predicted": None if predict is None else predict(group[0]),
                "calibrated": predict is not None,
                "by_bytes": servers_needed(group[0]["workers"]),
                "formula": FORMULA,
            }
        )
    return found


def _wins(rows: Iterable[Entry], setting: str) -> bool | None:
    """Whether the hub's steps are shown to be shorter than the ring's; None where one was not measured."""
    times = {row["row"]: row["numbers"]["step_ms"] for row in rows if row["setting"] == setting}
    hub, ring = times.get("hub-bsp"), times.get("ring")
    if hub is None or ring is None or (times_as_long := ratio(ring, hub)) is None:
        return None
    return times_as_long.decided and times_as_long.value > 1


def _from_on(wins: Mapping[int, bool]) -> int | None:
    """The fewest servers from which on all that were tried win; by rising servers."""
    first = None
    for servers, won in reversed(list(wins.items())):
        if not won:
            break
        first = servers
    return first


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


def _median(rows: Iterable[Entry], setting: str, row: str, name: str) -> float | None:
    for entry in rows:
        if (entry["setting"], entry["row"]) == (setting, row) and entry["numbers"][name] is not None:
            value: float = entry["numbers"][name]["median"]
            return value
    return None

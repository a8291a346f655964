"""Hardships: effects of a straggler or a fault on each row, against the same setting without it."""

from __future__ import annotations

from msgspec.structs import replace

from hubring.workers.compare.experiment.row import meets
from hubring.workers.compare.experiment.setting import Fault
from hubring.workers.compare.result.comparisons import Comparisons
from hubring.workers.compare.result.ratio import Ratio
from hubring.workers.compare.result.setting_text import Scope, listed, scopes, straggler


def hardships(compared: Comparisons) -> list[str]:
    """Returns sentences: which rows each straggler slows and by how much; which rows survive a fault."""
    found = scopes(compared)
    return [
        *(text for scope in found if scope.setting.straggler for text in _slowed(scope, found)),
        *(text for scope in found if scope.setting.fault for text in _survived(scope, scope.setting.fault)),
    ]


def _slowed(scope: Scope, others: list[Scope]) -> list[str]:
    wanted = replace(scope.setting, straggler=None)
    calm = next((other for other in others if other.setting == wanted), None)
    if calm is None or scope.setting.straggler is None:
        return []
    delayed = [name for name in scope.names if meets(name, scope.setting).straggler]
    steps = {name: _step_ratio(name, scope, calm) for name in delayed}
    ratios = {name: each for name, each in steps.items() if each}
    slowed = [f"{name} {each}" for name, each in ratios.items() if each.more]
    spared = [name for name, each in ratios.items() if each.even or (each.decided and each.value < 1)]
    unsure = [f"{name} {each}" for name, each in ratios.items() if not each.decided and not each.even]
    slow = straggler(scope.setting.straggler)
    effects = [f"{slow} makes steps of {listed(slowed)} times as long"] if slowed else []
    start = "but not of" if slowed else f"{slow} does not slow"
    effects += [f"{start} {listed(spared, 'or')}"] if spared else []
    sure = ", ".join(effects)
    doubt = f"with and without {slow}, steps show no clear difference: {listed(unsure)} times as long"
    return [scope.say(f"{each}.", besides=slow) for each in (sure, doubt if unsure else "") if each]


def _step_ratio(name: str, scope: Scope, calm: Scope) -> Ratio | None:
    """Returns the ratio of mean step times with and without; medians would hide rare delays."""
    here, there = scope.row(name), calm.row(name)
    return None if here is None or there is None else scope.compared.ratio("samples_per_second", there, here)


def _survived(scope: Scope, fault: Fault) -> list[str]:
    rows = [
        row.row
        for row in scope.rows
        if row.failed is None and row.number("final_metric") and meets(row.row, scope.setting).fault
    ]
    if not rows:
        return []
    left = "without" if fault.victim == "worker" else "after the loss of"
    said = [scope.say(f"{listed(rows)} finished {left} {fault.words}.")]
    for name in rows:
        pause, lost = scope.number(name, "pause_seconds"), scope.number(name, "lost_steps")
        if pause is not None and lost is not None:
            said.append(
                scope.say(f"{name} paused for {pause.median:.2f} s and repeated {lost.median:g} steps.")
            )
    return said

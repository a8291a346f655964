"""Hardships: what a straggler or a loss did to each row, held against the same setting without it."""

from __future__ import annotations

from msgspec.structs import replace

from hubring.workers.compare.experiment.setting import Fault
from hubring.workers.compare.result.findings import Findings
from hubring.workers.compare.result.ratio import Ratio, ratio
from hubring.workers.compare.result.setting_text import Scope, listed, scopes, straggler


def hardships(findings: Findings) -> list[str]:
    """Sentences: whom each straggler slowed, and by how much; who went on after a loss."""
    found = scopes(findings)
    return [
        *(said for scope in found if scope.setting.straggler for said in _slowed(scope, found)),
        *(said for scope in found if scope.setting.fault for said in _survived(scope, scope.setting.fault)),
    ]


def _slowed(scope: Scope, others: list[Scope]) -> list[str]:
    wanted = replace(scope.setting, straggler=None)
    calm = next((other for other in others if other.setting == wanted), None)
    if calm is None or scope.setting.straggler is None:
        return []
    steps = {name: _step_ratio(name, scope, calm) for name in scope.names}
    ratios = {name: each for name, each in steps.items() if each}
    slowed = [f"{name} {each}" for name, each in ratios.items() if each.more]
    spared = [name for name, each in ratios.items() if each.even or (each.decided and each.value < 1)]
    unsure = [f"{name} {each}" for name, each in ratios.items() if not each.decided and not each.even]
    who = straggler(scope.setting.straggler)
    told = [f"{who} makes steps longer, {listed(slowed)} times as long"] if slowed else []
    told += [f"{'not' if slowed else f'{who} does not slow'} {listed(spared, 'or')}"] if spared else []
    sure = ", ".join(told)
    doubt = f"with {who} and without, steps are not told apart: {listed(unsure)} times as long"
    return [scope.say(f"{each}.", besides=who) for each in (sure, doubt if unsure else "") if each]


def _step_ratio(name: str, scope: Scope, calm: Scope) -> Ratio | None:
    """Mean time a step here by that without; of means, since medians hide what happens seldom."""
    here, there = scope.number(name, "samples_per_second"), calm.number(name, "samples_per_second")
    return None if here is None or there is None else ratio(there.values, here.values)


def _survived(scope: Scope, fault: Fault) -> list[str]:
    rows = [
        row.row
        for row in scope.rows
        if row.failed is None and row.number("final_metric") and row.row != "local"
    ]
    if not rows:
        return []
    return [scope.say(f"{listed(rows)} went on to the end without worker {fault.rank}.")]

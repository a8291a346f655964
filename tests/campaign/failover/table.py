"""The report of many runs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

from tests.campaign.failover.plan import KINDS, OF_A_HUB
from tests.campaign.failover.play import Played


def spread(values: Sequence[float]) -> str:
    """Returns median, 95th percentile and longest of some seconds."""
    if len(values) < 2:
        return " - | - | - |"
    late = quantiles(values, n=20, method="inclusive")[-1]
    return f" {median(values):.2f} | {late:.2f} | {max(values):.2f} |"


def report(results: Sequence[Played]) -> str:
    """Returns a table of the kills that count, by victim, and by mode and wire; times are in seconds."""
    counted = [each for each in results if not each.late or each.faults]
    lines = [
        "| killed, or job | runs | wrong | longest step: median | 95 % | longest |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        row("all", counted),
    ]
    for target in dict.fromkeys(OF_A_HUB):
        lines.append(row(target, [each for each in counted if each.plan.target == target]))
    for kind, wire in dict.fromkeys(KINDS):
        these = [each for each in counted if (each.plan.kind, each.plan.wire) == (kind, wire)]
        lines.append(row(f"{kind}, {wire}", these))
    answers = [each.took for each in counted if each.plan.target == "coordinator"]
    lines += ["", f"Until a coordinator answers again: median, 95 %, longest |{spread(answers)}"]
    return "\n".join(lines)


def row(name: str, results: Sequence[Played]) -> str:
    wrong = sum(bool(each.faults) for each in results)
    return f"| {name} | {len(results)} | {wrong} |{spread([each.pause for each in results])}"

"""The answer: who won, by how much, and whether to trust it, in one sentence of at most 25 words."""

from __future__ import annotations

from hubring.workers.compare.judge.hub_vs_ring import chosen, on_a_cluster
from hubring.workers.compare.result.comparisons import Comparisons
from hubring.workers.compare.result.findings import Entry, Findings
from hubring.workers.compare.result.ratio import EVEN, Ratio
from hubring.workers.compare.result.setting_text import Scope, listed, scopes


def answer(compared: Comparisons) -> str:
    """Returns the sentence. With several settings it counts what each decides."""
    contests = [contest for scope in scopes(compared) if (contest := _contest(scope)) is not None]
    if not contests:
        return _nothing(compared.findings)
    if len(contests) > 1:
        return _count(contests)
    (first, second, ratio), here = contests[0], _here(compared.findings)
    if ratio.doubt:
        return f"Not decided on {here}: {ratio.doubt}."
    if ratio.decided:
        winner, loser, times = (first, second, ratio) if ratio.value > 1 else (second, first, ratio.inverse)
        by = f"{times.once} times as fast{times.range}"
        return f"On {here} {_the(winner)} is {by} as {_the(loser)} for this job."
    both = listed([first, second])
    if ratio.even:
        return f"On {here} {both} are equally fast for this job, within {EVEN - 1:.0%}."
    if ratio.spread is None:
        return f"One seed cannot tell {both} apart; run at least three seeds."
    if ratio.like_repeats:
        return f"On {here} {both} differ by no more than two runs of the same row, so neither wins."
    needed = "" if ratio.needed is None else f"; about {ratio.needed} seeds would decide it"
    return f"On {here} {both} show no clear difference for this job{needed}."


def _contest(scope: Scope) -> tuple[str, str, Ratio] | None:
    """Returns the two rows to compare, hub and ring or else the first two with a speed, and their ratio."""
    raced = [row for row in scope.rows if row.number("samples_per_second") and scope.setting.fault is None]
    first, second = _hub_and_ring(raced) or _first_two(raced)
    if not (first and second):
        return None
    ratio = scope.ratio("samples_per_second", first, second)
    if ratio is None:
        return None
    names = ("hub", "ring") if second == "ring" and first.startswith("hub-") else (first, second)
    return (*names, ratio)


def _hub_and_ring(rows: list[Entry]) -> tuple[str, str] | None:
    hubs = [row.row for row in rows if row.synchronous and row.exact and row.row.startswith("hub-")]
    return (chosen(hubs), "ring") if hubs and any(row.row == "ring" for row in rows) else None


def _first_two(rows: list[Entry]) -> tuple[str, str]:
    names = sorted((row.row for row in rows), key=lambda name: name == "local")  # one process comes last
    return (names[0], names[1]) if len(names) > 1 else ("", "")


def _count(contests: list[tuple[str, str, Ratio]]) -> str:
    """Returns in how many settings each row wins."""
    wins: dict[str, int] = {}
    for first, second, ratio in contests:
        if ratio.decided:
            winner = first if ratio.value > 1 else second
            wins[winner] = wins.get(winner, 0) + 1
    left = len(contests) - sum(wins.values())
    if not wins:
        return f"In none of {len(contests)} settings is there a clear winner."
    parts = [f"{_the(name)} wins in {count}" for name, count in wins.items()]
    said = f"Of {len(contests)} settings, {listed(parts)}"
    return f"{said}; {left} {'is' if left == 1 else 'are'} not decided." if left else f"{said}."


def _nothing(findings: Findings) -> str:
    if not findings.gate.passed:
        return "No row is called faster, because rows that should compute the same do not: see the gate."
    return "This experiment measured no two rows that can be compared."


def _here(findings: Findings) -> str:
    if any(row.emulated for row in findings.rows) or any(each.link for each in findings.settings):
        return "the emulated machines"
    return "these machines" if on_a_cluster(findings) else "this machine"


def _the(name: str) -> str:
    return f"the {name}" if name in ("hub", "ring") else name

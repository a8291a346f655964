"""The answer: who won, by how much, and whether to trust it, in one sentence of at most 25 words."""

from __future__ import annotations

from typing import NamedTuple

from hubring.workers.compare.judge.hub_vs_ring import chosen, on_a_cluster, racing
from hubring.workers.compare.result.comparisons import Comparisons
from hubring.workers.compare.result.findings import Findings
from hubring.workers.compare.result.ratio import EVEN, Ratio
from hubring.workers.compare.result.setting_text import Scope, listed, scopes


class Contest(NamedTuple):
    """Two rows of one setting, in words and by name, and the ratio of their speeds."""

    first: str
    second: str
    rows: tuple[str, str]
    ratio: Ratio
    scope: Scope

    @property
    def one_process_wins(self) -> bool:
        """Whether one process alone is faster than both."""
        ratios = [self.scope.ratio("samples_per_second", "local", row) for row in self.rows]
        return all(each is not None and each.more for each in ratios)


def answer(compared: Comparisons) -> str:
    """Returns the sentence. With several settings it counts what each decides."""
    contests = [contest for scope in scopes(compared) if (contest := _contest(scope)) is not None]
    if not contests:
        return _nothing(compared.findings)
    if len(contests) > 1:
        return _count(contests)
    return _of_one(contests[0], _here(compared.findings))


def _of_one(found: Contest, here: str) -> str:
    first, second, ratio, both = found.first, found.second, found.ratio, listed([found.first, found.second])
    if ratio.doubt:
        return f"Not decided between {both}: {ratio.doubt}."
    alone = "; one process alone is faster" if found.one_process_wins else ""
    if ratio.decided:
        winner, loser, times = (first, second, ratio) if ratio.value > 1 else (second, first, ratio.inverse)
        by = f"{times.once} times as fast{times.range}"
        return f"On {here} {_the(winner)} is {by} as {_the(loser)}{alone or ' for this job'}."
    if ratio.even:
        return f"On {here} {both} are equally fast for this job, within {EVEN - 1:.0%}{alone}."
    if ratio.spread is None:
        return f"One seed cannot tell {both} apart; run at least three seeds."
    if ratio.like_repeats:
        return f"On {here} {both} differ by no more than two runs of the same row, so neither wins{alone}."
    needed = "" if ratio.needed is None else f"; about {ratio.needed} seeds would decide it"
    return f"On {here} {both} show no clear difference for this job{needed}{alone}."


def _contest(scope: Scope) -> Contest | None:
    """Returns the two rows to compare; None if fewer than two can be compared.

    The rows are hub and ring, or else the first two that compute the same.
    """
    raced = [] if scope.setting.fault is not None else racing(scope)
    hubs = [name for name in raced if name.startswith("hub-")]
    if hubs and "ring" in raced:
        rows = (chosen(hubs), "ring")
        several = sum(name.startswith("hub-") for name in scope.names) > 1
        words = rows if several else ("hub", "ring")
    elif len(raced) > 1:
        first, second, *_ = sorted(raced, key=lambda name: name == "local")  # one process comes last
        words = rows = (first, second)
    else:
        return None
    ratio = scope.ratio("samples_per_second", *rows)
    return None if ratio is None else Contest(*words, rows, ratio, scope)


def _count(contests: list[Contest]) -> str:
    """Returns in how many settings each row wins."""
    wins: dict[str, int] = {}
    for contest in contests:
        if contest.ratio.decided:
            winner = contest.first if contest.ratio.value > 1 else contest.second
            wins[winner] = wins.get(winner, 0) + 1
    left = len(contests) - sum(wins.values())
    if not wins:
        return f"In none of {len(contests)} settings is there a clear winner."
    parts = [f"{_the(name)} wins in {count}" for name, count in wins.items()]
    said = f"Of {len(contests)} settings, {listed(parts)}"
    return f"{said}; {left} {'is' if left == 1 else 'are'} not decided." if left else f"{said}."


def _nothing(findings: Findings) -> str:
    gate = findings.gate
    wrong = list(dict.fromkeys(each.row for each in gate.steps if not each.passed))
    reasons = [] if gate.agree else ["rows that should compute the same do not"]
    if wrong:
        reasons.append(f"{listed(wrong) if len(wrong) < 3 else f'{len(wrong)} rows'} took wrong steps")
    if reasons:
        return f"No row is called faster, because {' and '.join(reasons)}: see the gate."
    return "This experiment measured no two rows that can be compared by speed alone."


def _here(findings: Findings) -> str:
    if any(row.emulated for row in findings.rows) or any(each.link for each in findings.settings):
        return "emulated hosts"
    return "these machines" if on_a_cluster(findings) else "this machine"


def _the(name: str) -> str:
    return f"the {name}" if name in ("hub", "ring") else name

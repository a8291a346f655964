"""What a campaign found, as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from tests.campaign.scenario import KILL_MODES, MODES, Scenario


class Result(Struct, frozen=True):
    """One run.

    Attributes:
        scenario: What happened.
        violations: By invariant, in words.
        seconds: How long it took.
    """

    scenario: Scenario
    violations: dict[str, list[str]]
    seconds: float

    @property
    def command(self) -> str:
        """The command that repeats it."""
        kills = " --kills" * self.scenario.kills
        return f"python -m tests.campaign{kills} --seeds {self.scenario.seed}"


def counts(results: Sequence[Result]) -> str:
    """Returns a table of faults and modes: runs, and after a slash those with a violation."""
    runs: Counter[tuple[str, str]] = Counter()
    bad: Counter[tuple[str, str]] = Counter()
    for result in results:
        scenario = result.scenario
        row = f"{scenario.fault}, {scenario.place}"
        runs[row, scenario.mode] += 1
        bad[row, scenario.mode] += bool(result.violations)
    modes = KILL_MODES if any(result.scenario.kills for result in results) else MODES
    lines = ["| fault | " + " | ".join(modes) + " |", "| --- |" + " --- |" * len(modes)]
    for row in sorted({row for row, _ in runs}):
        cells = [cell(runs[row, mode], bad[row, mode]) for mode in modes]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    totals = [cell(total(runs, mode), total(bad, mode)) for mode in modes]
    lines.append("| all | " + " | ".join(totals) + " |")
    return "\n".join(lines)


def cell(runs: int, bad: int) -> str:
    return "" if not runs else f"{runs} / {bad}" if bad else str(runs)


def total(counter: Counter[tuple[str, str]], mode: str) -> int:
    return sum(count for (_, one), count in counter.items() if one == mode)


def details(results: Sequence[Result]) -> str:
    """Returns each run with a violation: the scenario, what was found, and the command that repeats it."""
    lines = []
    for result in results:
        if result.violations:
            lines.append(f"- `{result.command}`: {result.scenario}")
            for name, found in result.violations.items():
                lines += [f"  - {name}: {each}" for each in found]
    return "\n".join(lines)


def report(results: Sequence[Result], seconds: float) -> str:
    """Returns the whole report.

    Args:
        results: The runs.
        seconds: How long the campaign took.
    """
    bad = sum(bool(result.violations) for result in results)
    longest = max((result.seconds for result in results), default=0.0)
    head = f"{len(results)} runs in {seconds:.0f} s, the longest {longest:.1f} s; {bad} with a violation."
    parts = [head, counts(results)]
    if bad:
        parts.append(details(results))
    return "\n\n".join(parts)

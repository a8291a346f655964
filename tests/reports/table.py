"""Writes the lists of reports into README.md: `python -m tests.reports.table`."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from tests.reports.report import NOT_RUN, TOPOLOGIES, Report

HERE = Path(__file__).parent
README = HERE / "README.md"


def readme() -> str:
    """The text of README.md: what stands before its first section, with today's numbers, and the lists."""
    sections, reports = [], []
    for path in sorted(HERE.glob("test_*.py")):
        module = import_module(f"tests.reports.{path.stem}")
        rows = [test for test in vars(module).values() if hasattr(test, "report")]
        if rows:
            title = str(module.__doc__).splitlines()[0].rstrip(".")
            lines = "".join(_line(test.__doc__, test.report) for test in rows)
            sections.append(f"## [{title}]({path.name})\n\n{lines}")
            reports += [test.report for test in rows]
    intro = README.read_text().partition("\n## ")[0].rstrip()
    numbered = len(set(re.findall(r"[\w.-]+/[\w.-]+#\d+", " ".join(one.number for one in reports))))
    counts = f"{len(reports)} scripts, {numbered} reports with a number."
    intro = re.sub(r"\d+ scripts, \d+ reports with a number\.", counts, intro)
    return "\n".join([f"{intro}\n", *sections])


def _line(done: str, row: Report) -> str:
    what = done.strip().splitlines()[0].rstrip(".")
    result = _result(row)
    return f"- {what} ({row.number})" + (f": {result}\n" if result != "ok" else "\n")


def _result(row: Report) -> str:
    """What most variants have in common, then what each of the others has."""
    by_outcome: dict[str, list[str]] = {}
    for topology in TOPOLOGIES:
        by_outcome.setdefault(row.outcome(topology), []).append(topology)
    most, *others = sorted(by_outcome, key=lambda outcome: -len(by_outcome[outcome]))
    few = [f"{_with_reason(outcome, row)}: {', '.join(by_outcome[outcome])}" for outcome in others]
    return "; ".join([_with_reason(most, row), *few])


def _with_reason(outcome: str, row: Report) -> str:
    """An outcome, with the pattern of the error, what is expected, or why it is another one."""
    expected = "" if row.expected == "as torch" else row.expected
    if outcome == NOT_RUN:
        return outcome
    told = {"refused": [f"`{row.error}`"], "ok": [expected]}.get(outcome, [row.reason])
    reasons = "; ".join(reason for reason in told if reason)
    return f"{outcome} ({reasons})" if reasons else outcome


if __name__ == "__main__":
    README.write_text(readme())

"""First screens of invented reports: what a stranger reads before anything else.

    python -m tests.support.compare.first_screens [--pages FOLDER]

prints the last lines of the terminal for each; `--pages` also writes the pages.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec.structs import replace

from hubring.workers.compare.decide.decision import Comparisons
from hubring.workers.compare.decide.verdict import answer, verdict
from hubring.workers.compare.findings import Findings
from hubring.workers.compare.plan.experiment import LinkTable
from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.run.noise import RunNoise
from hubring.workers.compare.run.outcome import Line
from hubring.workers.compare.show.figures import trust
from hubring.workers.compare.show.page import page
from hubring.workers.compare.statistics import SPEEDS
from tests.support.compare.replayed import CALM, SEEDS, Replayed, findings, paced, record

ROWS = ("ring", "hub-bsp", "hub-asp")


def screens(folder: Path) -> Iterator[tuple[str, Findings]]:
    """Yields the findings of each, by name; their runs are written to the folder."""

    def made(name: str, trainer: Replayed, **changes: object) -> Findings:
        return findings(folder / name, trainer, **{"rows": ROWS, "seeds": SEEDS, **changes})

    diverged = made("diverged", paced({"ring": 0.02}))
    why = "3 of 3 runs: diverged after 41 steps; worker 1 reported: rank 1's gradient holds nan"
    yield "diverged", decided(diverged, "ring", failed=why)
    disturbed = paced({"ring": 0.02})
    disturbed.noise = RunNoise((0.0, 0.0), 0.4, cores=(1.0, 0.8))
    yield "disturbed", made("disturbed", disturbed)
    yield "null", made("null", paced({}))
    yield "winner", made("winner", paced({"ring": 0.013}, {"ring": (1.0, 1.04, 0.99)}))
    fewer = "ring trained with 704 samples in 22 steps, and hub-bsp with 1,408 samples in 44 steps"
    yield "samples", decided(made("samples", paced({"ring": 0.005})), "ring", withheld=fewer)

    def slow_link(run: PlannedRun) -> list[Line]:
        link = run.setting.link
        slow = link is not None and link.rate == 1e8 and run.row.name == "ring"
        return record((0.013 if slow else 0.01) * CALM[run.seed], pause=0.0)

    links = LinkTable(rate=(1e9, 1e8))
    yield "settings", made("settings", Replayed(records=slow_link), rows=ROWS[:2], link=links)


def decided(found: Findings, row: str, **changes: str) -> Findings:
    """Returns the findings if something is wrong with a row, so that it has no speeds."""
    rows = [
        each
        if each.row != row
        else replace(each, numbers={**each.numbers, **dict.fromkeys(SPEEDS, None)}, **changes)
        for each in found.rows
    ]
    compared = Comparisons(replace(found, rows=rows))
    return replace(compared.findings, verdict=verdict(compared, ()), answer=answer(compared))


def main() -> None:
    """Prints the screens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        for name, found in screens(Path(folder)):
            print(f"--- {name}\n{found.answer}\n{trust(found)}")
            print("".join(f"* {sentence}\n" for sentence in found.verdict))
            if options.pages is not None:
                (options.pages / f"{name}.html").write_text(page(found))


if __name__ == "__main__":
    main()

"""Who wins in many reports of one experiment, on a machine that is quiet or not.

    python -m tests.support.compare.winners null --reports 40 --out /tmp/null
    python -m tests.support.compare.winners factor --reports 20 --out /tmp/factor
    python -m tests.support.compare.winners digits --reports 10 --out /tmp/digits

`null` compares a row with itself under another name: hub-shm is what hub-bsp is on one host, so a winner is
a false one, and at most one report in twenty may name one. The exit code is 1 if the 95 % interval of that
share lies above it: even if the share is exactly one in twenty, a third of all sets of 40 reports have more
than two. `factor` makes each step of hub-shm take 1.3 times as long: the exit code is 1 if fewer than nine in
ten reports name hub-bsp, or any names hub-shm. `digits` is the built-in experiment while 0 to 8 other
processes are busy, another number every few seconds: the exit code is 1 if two reports name opposite winners.
The same command continues after an interruption. The last line is the result.

A winner is every comparison of a report that it calls decided, whatever its sentence.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import comb
from pathlib import Path

from hubring.workers.compare.decide.decision import SPEED, Comparison, Comparisons
from hubring.workers.compare.findings import Findings, decode

FALSE = 0.05
"""Largest share of reports that may name a winner where there is none."""
BUSY, CHANGE_SECONDS = 8, 5.0
"""Most busy processes beside the comparison, and how long their number stays the same."""
FOUND = 0.9
"""Smallest share of reports that must name a winner that is one."""
_PAIR = ("--rows", "hub-bsp,hub-shm", "--target", "0.5", "--epochs")
_SLOWER = "tests/support/scripts/slower.py"
_ARGUMENTS = "--epochs {epochs} --seed {seed} --lr {lr} --batch-size {batch}"
EXPERIMENTS = {
    "null": (*_PAIR, "2"),
    "factor": (
        *(*_PAIR, "2", "--script", _SLOWER, "--arguments", _ARGUMENTS, "--metric", "test_accuracy"),
        *("--batch", "64", "--learning-rate", "0.01"),
    ),
    "digits": ("digits",),
}
MISSED = 0.025
"""Probability of each end of the interval of a share to lie on the wrong side of it."""


def winners(findings: Findings) -> dict[Comparison, bool]:
    """Returns what a report calls decided: whether the first row has the larger number."""
    ratios = Comparisons(findings).ratios
    return {key: each.value > 1 for key, each in ratios.items() if each and each.decided}


def said(comparison: Comparison, larger: bool) -> str:
    """Returns a decided comparison in words."""
    name, one, other = comparison
    first, second = (f"{row} ({setting})" for setting, row in ((one, other) if larger else (other, one)))
    return f"{name} of {first} > {second}"


def chance(least: int, reports: int, share: float) -> float:
    """Returns the probability that so many reports name a winner, or more, if this share of all does."""
    return sum(comb(reports, n) * share**n * (1 - share) ** (reports - n) for n in range(least, reports + 1))


def interval(named: int, reports: int) -> tuple[float, float]:
    """Returns the share of all reports that name a winner, with 95 % confidence (Clopper and Pearson)."""
    low = _first(lambda share: chance(named, reports, share) >= MISSED) if named else 0.0
    high = _first(lambda share: chance(named + 1, reports, share) >= 1 - MISSED) if named < reports else 1.0
    return low, high


def _first(holds: Callable[[float], bool]) -> float:
    """Returns the smallest share for which something holds, if it holds for all larger ones."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def null_result(named: int, reports: int) -> tuple[str, bool]:
    """Returns the result of `null` in words, and whether it is as it should be."""
    (low, high), most = interval(named, reports), int(FALSE * reports)
    text = (
        f"{named} of {reports} reports name a winner that is none; with 95 % confidence {low:.1%} to"
        f" {high:.1%} of all reports do, and {FALSE:.0%} may;"
        f" at most {most} of {reports}: {'no' if named > most else 'yes'}"
    )
    return text, low <= FALSE


def factor_result(reports: Sequence[Mapping[Comparison, bool]]) -> tuple[str, bool]:
    """Returns the result of `factor` in words, and whether it is as it should be."""
    named = Counter(
        one[1] if larger else other[1]
        for report in reports
        for (number, one, other), larger in report.items()
        if number == SPEED
    )
    text = (
        f"{named['hub-bsp']} of {len(reports)} reports name the faster row and {named['hub-shm']} the slower"
    )
    return text, named["hub-bsp"] >= FOUND * len(reports) and not named["hub-shm"]


def _spin() -> None:
    while True:
        pass


@contextmanager
def load(seed: int) -> Iterator[None]:
    """Keeps 0 to `BUSY` processes busy while the block runs."""
    over, chance = threading.Event(), random.Random(seed)

    def change() -> None:
        while not over.is_set():
            processes = [multiprocessing.Process(target=_spin) for _ in range(chance.randint(0, BUSY))]
            for each in processes:
                each.start()
            over.wait(CHANGE_SECONDS)
            for each in processes:
                each.kill()
                each.join()

    changing = threading.Thread(target=change)
    changing.start()
    try:
        yield
    finally:
        over.set()
        changing.join()


def run(kind: str, number: int, folder: Path) -> None:
    """Makes one report, or continues it."""
    command = [sys.executable, "-m", "hubring.workers.compare.cli", "run", *EXPERIMENTS[kind]]
    done = subprocess.run([*command, "--out", str(folder)], stdout=sys.stderr)
    # 1: a row differs from another by more than the tolerance. It then shows no speed.
    if done.returncode not in (0, 1):
        raise SystemExit(f"report {number} ended with {done.returncode}")


def opposite(reports: Sequence[Mapping[Comparison, bool]]) -> list[Comparison]:
    """Returns the comparisons that two reports decide in opposite ways."""
    found: dict[Comparison, set[bool]] = {}
    for report in reports:
        for comparison, larger in report.items():
            found.setdefault(comparison, set()).add(larger)
    return [comparison for comparison, ways in found.items() if len(ways) > 1]


def main() -> None:
    """Makes the reports and prints who wins in each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=EXPERIMENTS)
    parser.add_argument("--reports", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    reports = []
    for number in range(options.reports):
        folder = options.out / f"{options.kind}-{number}"
        if not (folder / "results.json").exists():
            if options.kind == "digits":
                with load(number):
                    run(options.kind, number, folder)
            else:
                run(options.kind, number, folder)
        reports.append(winners(decode((folder / "results.json").read_bytes())))
        texts = [said(*each) for each in reports[-1].items()]
        print(f"{options.kind} {number}: {' / '.join(texts) or 'no winner'}", flush=True)
    named = sum(map(bool, reports))
    if options.kind != "digits":
        text, good = null_result(named, len(reports)) if options.kind == "null" else factor_result(reports)
        print(text)
        raise SystemExit(not good)
    apart = opposite(reports)
    for name, (_, one), (_, other) in apart:
        print(f"opposite winners in {name}: {one} and {other}")
    print(f"{named} of {len(reports)} reports name winners, {'some' if apart else 'none'} opposite ones")
    raise SystemExit(bool(apart))


if __name__ == "__main__":
    main()

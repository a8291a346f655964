"""Who wins in many reports of one experiment, on a machine that is quiet or not.

    python -m tests.support.compare.winners null --reports 40 --out /tmp/null
    python -m tests.support.compare.winners digits --reports 10 --out /tmp/digits

`null` compares a row with itself under another name: hub-shm is what hub-bsp is on one host, so a winner is
a false one, and at most one report in twenty may name one. `digits` is the built-in experiment while 0 to 8
other processes are busy, another number every few seconds: no two reports may name opposite winners. The same
command continues after an interruption. The last line is the result; the exit code is 1 if it is not as it
should be.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hubring.workers.compare.result.load_results import decode

FALSE = 0.05
"""Largest share of reports that may name a winner where there is none."""
BUSY, CHANGE_SECONDS = 8, 5.0
"""Most busy processes beside the comparison, and how long their number stays the same."""
EXPERIMENTS = {
    "null": ("--rows", "hub-bsp,hub-shm", "--epochs", "2", "--target", "0.5"),
    "digits": ("digits",),
}
CLAIMS = (" beats ", " loses to ", "times as fast", "times as long")
"""Words of every sentence that says that one row is better than another."""


def winners(folder: Path) -> list[str]:
    """Returns the claims of the report in a folder; empty if it names no winner."""
    findings = decode((folder / "results.json").read_bytes())
    texts = [findings.answer, *findings.verdict]
    return [text for text in texts if any(claim in text for claim in CLAIMS)]


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


def opposite(said: Sequence[Sequence[str]]) -> bool:
    """Whether of two reports one says that a row beats another row, and the other that it loses to it."""
    found: dict[tuple[str, str], set[str]] = {}
    for text in (text for texts in said for text in texts):
        for verb in (" beats ", " loses to "):
            first, won, rest = text.partition(verb)
            if won:
                found.setdefault((first.lower(), rest.partition(":")[0]), set()).add(verb)
    return any(len(verbs) > 1 for verbs in found.values())


def main() -> None:
    """Makes the reports and prints who wins in each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=EXPERIMENTS)
    parser.add_argument("--reports", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    said = []
    for number in range(options.reports):
        folder = options.out / f"{options.kind}-{number}"
        if not (folder / "results.json").exists():
            if options.kind == "digits":
                with load(number):
                    run(options.kind, number, folder)
            else:
                run(options.kind, number, folder)
        said.append(winners(folder))
        print(f"{options.kind} {number}: {' / '.join(said[-1]) or 'no winner'}", flush=True)
    named = sum(map(bool, said))
    if options.kind == "null":
        print(f"{named} of {len(said)} reports name a winner that is none")
        raise SystemExit(named > FALSE * len(said))
    print(
        f"{named} of {len(said)} reports name winners, {'some' if opposite(said) else 'none'} opposite ones"
    )
    raise SystemExit(opposite(said))


if __name__ == "__main__":
    main()

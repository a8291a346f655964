"""Times one exchange of a large model, rows taking turns: `python -m workers.bench`.

All processes of all rows live at once, on one host. In every round each row
takes its turn of a few steps while the others are blocked; a first round warms
up and does not count. A step begins at a barrier and ends when its slowest rank
has the new parameters.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from pathlib import Path

from ps.errors import HubringError
from workers.bench.table import HEAD, Entry, entry
from workers.bench.team import ROWS, Team
from workers.compare import machine
from workers.compare.process import Processes
from workers.compare.runner import clean_environment

BUCKET_MEGABYTES = 25
"""DistributedOptimizer's default, and DDP's."""


def main(argv: list[str] | None = None) -> None:
    """Prints the table, and one JSON object as the last line."""
    options = _parse(argv)
    print(HEAD, file=sys.stderr)
    try:
        entries = list(_all(options))
    except HubringError as error:
        print(f"bench: {error}", file=sys.stderr)
        print(json.dumps({"error": str(error), "exit_code": error.exit_code}))
        raise SystemExit(error.exit_code) from error
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps([each.as_json() for each in entries], indent=1))
    wrong = sum(each.wrong for each in entries)
    result = {"out": str(options.out), "wrong": wrong, "exit_code": 1 if wrong else 0}
    print(json.dumps({**result, "machine": machine.describe()}))
    raise SystemExit(result["exit_code"])


def _all(options: argparse.Namespace) -> Iterator[Entry]:
    for n in options.workers:
        for shape in options.shapes:
            for each in _bench(options, n, shape):
                print(each, file=sys.stderr)
                yield each


def _bench(options: argparse.Namespace, n: int, shape: str) -> list[Entry]:
    megabytes = options.megabytes if shape == "flat" else BUCKET_MEGABYTES
    job = ["--megabytes", str(options.megabytes), "--bucket-bytes", str(megabytes * 2**20)]
    environment = clean_environment(threads=max(1, machine.cores() // n))
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = stack.enter_context(Processes(place, environment, options.timeout))
        make = partial(Team, shards=options.shards, job=job, processes=processes, directory=place)
        teams = [make(row, n, timeout=options.timeout) for row in options.rows]
        rounds = [[team.turn(options.steps) for team in teams] for _ in range(1 + options.rounds)]
        for team in teams:
            team.dismiss()
        while processes.running():
            processes.pause("the end of the bench")
    turns = zip(*rounds[1:], strict=True)
    size = options.megabytes * 2**20
    return [entry(team.row, n, shape, size, own) for team, own in zip(teams, turns, strict=True)]


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers.bench", description="Time one exchange.")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], help="numbers of ranks [2 4]")
    parser.add_argument("--megabytes", type=int, default=100, help="MiB of float32 parameters [100]")
    parser.add_argument("--shapes", nargs="+", default=["flat", "bucketed"], choices=["flat", "bucketed"])
    parser.add_argument("--rounds", type=int, default=7, help="turns of every row that count [7]")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn [3]")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--shards", type=int, default=1, help="shards of every hub [1]")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for all rows of a shape [900]")
    default = Path("results") / f"bench-{datetime.now():%Y-%m-%d-%H%M%S}.json"
    parser.add_argument("--out", type=Path, default=default, help="file to write [results/bench-DATE.json]")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

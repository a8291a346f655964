"""`ps-worker bench`: times one exchange of a whole model, and compares it with peers and limits.

This module imports only typer, so that `--help` is fast.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

import typer

from hubring.ps.config import terminal
from hubring.ps.config.terminal import option
from hubring.workers.bench.row import NAME_WIDTH, ROWS
from hubring.workers.peers.rows import chosen

if TYPE_CHECKING:
    from hubring.workers.bench.case import BenchCase, BenchEntry
    from hubring.workers.bench.row import BenchRow

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

STANDARD = (
    "1:flat:sgd 2:flat:sgd 4:flat:sgd 2:flat:adam 2:resnet50:sgd 2:thousand:sgd 2:thousand-flat:sgd"
    " 1:lone:sgd 2:mlp:sgd 2:digits:sgd 2:coded:sgd"
)
"""The cases of `make bench`."""


def _rows_help() -> str:
    lines = [f"{name:<{NAME_WIDTH}} {row.about}" for name, row in ROWS.items()]
    return "\n".join(["\b", "Rows:", *lines])  # \b: click does not wrap the text


@app.command(epilog=_rows_help())
@terminal.takes(
    (
        option("cases", str, "RANKS:SHAPE:OPTIMIZER, separated by commas [default: the standard cases]"),
        option("rows", str, "rows, separated by commas [default: all that this machine supports]"),
        option("rounds", int, "timed turns of each row", 5, min=1),
        option("steps", int, "steps per turn [default: 3, or as many as fit]", min=1),
        option("shards", int, "shards of each hub [default: 2 for hub-shm, 1 for others]", min=1),
        option("megabytes", int, "size of the shape flat, in MiB of float32", 100, min=1),
        option(
            "bucket_bytes", int, "bucket size; without training, a hub uses one bucket", 25 * 2**20, min=4096
        ),
        option("timeout", float, "seconds within which one case must finish", 900.0),
        option("out", Path, "file for the results [default: results/bench-DATE.json]"),
        option("summary", Path, "measure nothing: print the tables of this file"),
        option("into", Path, "with --summary: write the tables into this page"),
    )
)
@terminal.concludes("ps-worker bench")
def bench(summary: Path | None, into: Path | None, **how: Any) -> dict[str, Any]:
    """Time one exchange of a model: push the gradients, average, step, and pull the parameters.

    Hubring's topologies, peers, and the limits of memory and sockets take turns in one run.
    Shapes: flat, resnet50, thousand, thousand-flat, lone; coded for the compressed rows;
    digits and mlp for whole training steps. Optimizers: sgd, adam. The command exits with 1 if any
    element is wrong.
    """
    return _measure(**how) if summary is None else _show(summary, into)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry of `ps-worker bench`."""
    terminal.unwind_on_sigterm()
    terminal.run(app, "ps-worker bench", argv)


def _show(summary: Path, into: Path | None) -> dict[str, Any]:
    from hubring.workers.bench.summary import put_into, read_entries, render

    text = render(read_entries(summary))
    if into is None:
        print(text, file=sys.stderr)
    else:
        put_into(into, text)
    return {"summary": str(summary), "into": str(into) if into else None, "exit_code": 0}


def _measure(cases: str | None, out: Path | None, rows: str | None, **how: Any) -> dict[str, Any]:
    from hubring.ps.config.environment import rest_threads
    from hubring.workers.bench.case import HEAD, BenchPlan
    from hubring.workers.bench.summary import render

    rest_threads()  # otherwise OpenMP threads spin on the cores of the next timed step
    plan, chosen = BenchPlan(rows=rows_of(rows), stamp=_stamp(), **how), cases_of(cases)
    out = out or Path("results") / f"bench-{datetime.now():%Y-%m-%d-%H%M%S}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    entries: list[BenchEntry] = []
    for case in chosen:
        print(f"\n{case}\n{HEAD}", file=sys.stderr)
        for each in plan.run(case):
            print(each, file=sys.stderr)
            entries.append(each)
        # Write after each case, so that an interrupted bench keeps its results.
        out.write_text(json.dumps([each.as_json() for each in entries], indent=1) + "\n")
    print(f"\n{render(entries)}", file=sys.stderr)
    wrong = sum(each.wrong for each in entries)
    return {"out": str(out), "wrong": wrong, "exit_code": 1 if wrong else 0}


def rows_of(names: str | None) -> list[BenchRow]:
    """Returns the named rows, or all that this machine supports; prints the rows that it leaves out.

    Raises:
        UsageError: A named row does not exist.
        ConfigError: This machine does not support a named row.
    """
    asked = chosen(map(str.strip, names.split(",")), ROWS) if names else list(ROWS.values())
    lacks = {row.name: lack for row in asked if (lack := row.missing())}
    _report_lacks("--rows" if names else "", lacks)
    return [row for row in asked if row.name not in lacks]


def _report_lacks(option: str, lacks: dict[str, str]) -> None:
    """Prints what is left out; raises ConfigError if an option names it."""
    from hubring.ps.core.errors import ConfigError

    if option and lacks:
        raise ConfigError("; ".join(f"{option} {name}: {lack}" for name, lack in lacks.items()))
    for name, lack in lacks.items():
        print(f"skipping {name}: {lack}", file=sys.stderr)


def _stamp() -> dict[str, str]:
    """Returns a `BenchEntry`'s machine, date and commit."""
    from hubring.workers.peers import machine

    found = machine.describe()
    where = f"{found['cores']} cores of {found['processor']}, {found['system']}"
    versions = f"Python {found['python']}, torch {found['torch']}"
    return {"machine": f"{where}, {versions}", "date": f"{datetime.now():%Y-%m-%d}", "commit": _commit()}


def _commit() -> str:
    """Returns the commit of the measured code, with `-dirty` if files differ; empty without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    if which("git") is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def cases_of(text: str | None) -> list[BenchCase]:
    """Parses `--cases`; the standard set leaves out the cases whose packages are not installed.

    Raises:
        UsageError: A case is malformed, or a shape is unknown.
        ConfigError: A package that a named case needs is not installed.
    """
    from hubring.ps.core.errors import UsageError
    from hubring.ps.core.packages import missing
    from hubring.workers.bench import job
    from hubring.workers.bench.case import BenchCase

    cases, lacks = [], dict[str, str]()
    for word in (text or STANDARD).replace(",", " ").split():
        match word.split(":"):
            case [n, shape, ("sgd" | "adam") as optimizer] if n.isdecimal() and int(n) > 0:
                needs = job.find_shape(shape).needs
                if needs is not None and (lack := missing(needs)):
                    lacks[word] = lack
                else:
                    cases.append(BenchCase(int(n), shape, optimizer))
            case _:
                raise UsageError(f"--cases: {word!r}: expected RANKS:SHAPE:OPTIMIZER, as 2:resnet50:adam")
    _report_lacks("--cases" if text else "", lacks)
    return cases

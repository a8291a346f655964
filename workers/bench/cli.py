"""`ps-worker bench`: times one exchange of a whole model, peers and limits beside it.

Only typer is imported here, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hubring.ps.config import terminal
from hubring.workers.bench.rows.row import ROWS

if TYPE_CHECKING:
    from hubring.workers.bench.case import Case
    from hubring.workers.bench.report.table import Entry
    from hubring.workers.bench.rows.row import Row

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

STANDARD = (
    "1:flat:sgd 2:flat:sgd 4:flat:sgd 2:flat:adam 2:resnet50:sgd 2:thousand:sgd 2:thousand-flat:sgd"
    " 1:lone:sgd 2:mlp:sgd 2:digits:sgd 2:coded:sgd"
)
"""The cases of `make bench`."""


def _rows_help() -> str:
    lines = [f"{row.name:<15} {row.about}" for row in ROWS.values()]
    return "\n".join(["\b", "Rows:", *lines])  # \b: not to be wrapped


@app.command(epilog=_rows_help())
def bench(
    cases: Annotated[
        str | None, typer.Option(help="ranks:shape:optimizer, by comma [the standard set]")
    ] = None,
    rows: Annotated[str | None, typer.Option(help="which ways, by comma [all that this machine has]")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="turns of every row that count")] = 5,
    steps: Annotated[int | None, typer.Option(min=1, help="of a turn [3, or what fits]")] = None,
    shards: Annotated[int | None, typer.Option(min=1, help="of every hub [hub-shm 2, others 1]")] = None,
    megabytes: Annotated[int, typer.Option(min=1, help="MiB of float32 in the shape flat")] = 100,
    bucket_bytes: Annotated[
        int, typer.Option(min=4096, help="handed over at once [hubs that do not train: all]")
    ] = 25 * 2**20,
    timeout: Annotated[float, typer.Option(help="seconds that one case may take")] = 900.0,
    out: Annotated[Path | None, typer.Option(help="file to write [results/bench-DATE.json]")] = None,
    summary: Annotated[
        Path | None, typer.Option(help="measure nothing: print the tables of this file")
    ] = None,
    into: Annotated[Path | None, typer.Option(help="with --summary: write the tables into this page")] = None,
) -> None:
    """Time one exchange of a model: push, mean, optimizer, parameters back in every worker.

    Peers, our modes and the limits of memory and sockets take turns in one run.
    Shapes: flat, resnet50, thousand, thousand-flat, lone; coded has the compressed rows;
    digits and mlp are whole training steps. Optimizers: sgd, adam. Ends with 1 if a single
    element came out wrong.
    """
    told = dict(locals())
    shown = told.pop("summary"), told.pop("into")
    act = partial(_show, *shown) if shown[0] else partial(_measure, **told)
    raise SystemExit(terminal.conclude("ps-worker bench", act))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry of `ps-worker bench` and `python -m hubring.workers.bench`."""
    terminal.unwind_on_sigterm()
    terminal.run(app, "ps-worker bench", argv)


def _show(summary: Path, into: Path | None) -> dict[str, Any]:
    from hubring.workers.bench.report.summary import put_into, read, render

    text = render(read(summary))
    if into is None:
        print(text, file=sys.stderr)
    else:
        put_into(into, text)
    return {"summary": str(summary), "into": str(into) if into else None, "exit_code": 0}


def _measure(cases: str | None, out: Path | None, rows: str | None, **how: Any) -> dict[str, Any]:
    from hubring.ps.config.environment import rest_threads
    from hubring.workers.bench.case import Plan
    from hubring.workers.bench.report.summary import render
    from hubring.workers.bench.report.table import HEAD

    rest_threads()  # or they would spin, after the bench's own loops, on the cores of the step timed next
    plan, chosen = Plan(rows=rows_of(rows), stamp=_stamp(), **how), cases_of(cases)
    out = out or Path("results") / f"bench-{datetime.now():%Y-%m-%d-%H%M%S}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    entries: list[Entry] = []
    for case in chosen:
        print(f"\n{case}\n{HEAD}", file=sys.stderr)
        for each in plan.run(case):
            print(each, file=sys.stderr)
            entries.append(each)
        # After every case: whoever stops the bench keeps what it has.
        out.write_text(json.dumps([each.as_json() for each in entries], indent=1) + "\n")
    print(f"\n{render([each.as_json() for each in entries])}", file=sys.stderr)
    wrong = sum(each.wrong for each in entries)
    return {"out": str(out), "wrong": wrong, "exit_code": 1 if wrong else 0}


def rows_of(names: str | None) -> list[Row]:
    """The rows asked for, or all that this machine has; says which it has not.

    Raises:
        UsageError: One was asked for that does not exist, or cannot be had here.
    """
    from hubring.ps.core.errors import UsageError
    from hubring.workers.bench.rows.row import select

    chosen = select(name.strip() for name in names.split(",")) if names else list(ROWS.values())
    lacks = {row.name: lack for row in chosen if (lack := row.missing())}
    if names and lacks:
        raise UsageError("; ".join(f"--rows {name}: {lack}" for name, lack in lacks.items()))
    for name, lack in lacks.items():
        print(f"without {name}: {lack}", file=sys.stderr)
    return [row for row in chosen if row.name not in lacks]


def _stamp() -> dict[str, str]:
    """What is measured, where and when, as an `Entry` has it."""
    from hubring.workers.compare.run import machine

    found = machine.describe()
    where = f"{found['cores']} cores of {found['processor']}, {found['system']}"
    versions = f"Python {found['python']}, torch {found['torch']}"
    return {"machine": f"{where}, {versions}", "date": f"{datetime.now():%Y-%m-%d}", "commit": _commit()}


def _commit() -> str:
    """Of the code that is measured, marked where files differ from it; empty where git does not tell."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    if which("git") is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def cases_of(text: str | None) -> list[Case]:
    """What `--cases` asks for.

    Raises:
        UsageError: A word of it is no case.
    """
    from hubring.ps.core.errors import UsageError
    from hubring.workers.bench import shapes
    from hubring.workers.bench.case import Case

    cases = []
    for word in (text or STANDARD).replace(",", " ").split():
        match word.split(":"):
            case [n, shape, ("sgd" | "adam") as optimizer] if n.isdecimal() and int(n) > 0:
                shapes.find(shape)
                cases.append(Case(int(n), shape, optimizer))
            case _:
                raise UsageError(f"--cases: {word!r} is not RANKS:SHAPE:OPTIMIZER, as in 2:resnet50:adam")
    return cases

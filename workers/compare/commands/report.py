"""`ps-compare report`: writes the results and the report again from finished runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hubring.ps.config import terminal


def report(
    folder: Annotated[Path, typer.Argument(help="folder of a comparison (--out)")],
    tolerance: Annotated[
        float | None, typer.Option(help="allowed difference of synchronous rows [that of the runs]")
    ] = None,
) -> None:
    """Write results.json and the report again, without training."""
    raise SystemExit(terminal.conclude("ps-compare", lambda: _report(folder, tolerance)))


def _checking(run: str) -> None:
    print(f"checking the steps of {run}", file=sys.stderr)


def _report(folder: Path, tolerance: float | None) -> dict[str, Any]:
    from hubring.workers.compare.comparison import Comparison
    from hubring.workers.compare.output.screen import show

    comparison = Comparison.open(folder)
    found = (comparison if tolerance is None else comparison.judged_by(tolerance)).report(_checking)
    show(found, folder / "report.html")
    return {
        "report": str(folder / "report.html"),
        "results": str(folder / "results.json"),
        "verdict": found.verdict,
        "exit_code": 0,
    }

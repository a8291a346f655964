"""`ps-compare report`: makes the results and the report again from what the runs left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hubring.ps.config import terminal


def report(
    folder: Annotated[Path, typer.Argument(help="what --out named")],
    tolerance: Annotated[
        float | None, typer.Option(help="how far synchronous rows may be apart [as they were run]")
    ] = None,
) -> None:
    """Make results.json and the report again; nothing is trained."""
    raise SystemExit(terminal.conclude("ps-compare", lambda: _report(folder, tolerance)))


def _report(folder: Path, tolerance: float | None) -> dict[str, Any]:
    from hubring.workers.compare.comparison import Comparison
    from hubring.workers.compare.output.screen import show

    comparison = Comparison.open(folder)
    found = (comparison if tolerance is None else comparison.judged_by(tolerance)).report()
    show(found, folder / "report.html")
    return {
        "report": str(folder / "report.html"),
        "results": str(folder / "results.json"),
        "verdict": found.verdict,
        "exit_code": 0,
    }

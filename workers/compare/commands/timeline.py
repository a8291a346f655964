"""`ps-compare timeline`: merges the traces of servers and workers on all hosts into one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hubring.ps.config import terminal


def timeline(
    folder: Annotated[Path, typer.Argument(help="folder of --trace; copy the files of all hosts into it")],
    out: Annotated[Path | None, typer.Option(help="file to write [FOLDER/trace.json]")] = None,
) -> None:
    """Merge traces into one timeline for Perfetto, on the coordinator's clock."""
    raise SystemExit(terminal.conclude("ps-compare", lambda: _timeline(folder, out or folder / "trace.json")))


def _timeline(folder: Path, out: Path) -> dict[str, Any]:
    from msgspec import to_builtins

    from hubring.ps.core.errors import UsageError
    from hubring.workers.compare.run.timeline import merge

    merged = merge(folder, out)
    if merged.processes == 0:
        raise UsageError(f"{folder} holds no NAME.trace.json with events; use the folder given with --trace")
    clocks = to_builtins(merged.clocks)
    return {"timeline": str(out), "processes": merged.processes, "clocks": clocks, "exit_code": 0}

"""`ps-compare list`: rows, jobs, built-in experiments and results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hubring.ps.config import terminal
from hubring.workers.compare.command import resume_command

if TYPE_CHECKING:
    from hubring.workers.compare.experiment.row import Row


def show_list(
    folder: Annotated[Path, typer.Argument(help="folder of results [results]")] = Path("results"),
) -> None:
    """List rows, jobs, built-in experiments and results."""
    raise SystemExit(terminal.conclude("ps-compare", lambda: _list(folder)))


def _list(folder: Path) -> dict[str, Any]:
    from hubring.ps.config.settings import read_toml
    from hubring.workers.compare.experiment.experiment_file import shipped
    from hubring.workers.compare.experiment.job import JOBS
    from hubring.workers.compare.experiment.row import EVERY

    results = {path.parent.name: _state(path.parent) for path in sorted(folder.glob("*/experiment.json"))}
    parts: dict[str, dict[str, str]] = {
        "rows": {row.name: _describe(row) for row in EVERY.values()},
        "jobs": {job.name: f"measured by {job.title}" for job in JOBS.values()},
        "experiments": {name: read_toml(path).get("about", "") for name, path in shipped().items()},
        f"results in {folder}": results,
    }
    for title, entries in parts.items():
        print(f"\n{title}", file=sys.stderr)
        for name, about in (entries or {"none": ""}).items():
            print(f"  {name:<22} {about}".rstrip(), file=sys.stderr)
    return {**{title.partition(" ")[0]: list(entries) for title, entries in parts.items()}, "exit_code": 0}


def _describe(row: Row) -> str:
    missing = "" if row.peer is None else row.peer.missing()
    return f"{row.about}; {missing}" if missing else row.about


def _state(folder: Path) -> str:
    finished = len(list(folder.glob("runs/*/outcome.json")))
    if (folder / "results.json").is_file():
        return f"finished, {finished} runs"
    try:
        command = json.loads((folder / "experiment.json").read_text())["command"]
    except (ValueError, KeyError, TypeError) as cause:
        return f"experiment.json is damaged ({cause})"
    return f"not finished, {finished} runs so far; to resume, run: {resume_command(command, folder)}"

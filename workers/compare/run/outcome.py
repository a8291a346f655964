"""What one run left behind: a folder with its records, and last of all `outcome.json`.

Where that file is, the run is finished, and is never repeated. The folder can be copied.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from hubring.ps.core.errors import HubringError, NonFinite
from hubring.workers.compare.experiment.plan import Run
from hubring.workers.compare.run.noise import Noise

Line = Mapping[str, Any]
"""One report of a job: `step`, `seconds` since training began, and those of its metrics that are finite."""

FILE = "outcome.json"

NOT_FINITE = "not finite"
"""Key of a report under which the names of its metrics stand that are no finite numbers."""

EARLY = 20
"""Steps after which parameters are saved for the first time: too few for rounding to grow."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished run.

    Attributes:
        run: Which.
        folder: Where it wrote.
        commands: What was started, ready to be pasted.
        began: When, in ISO 8601.
        seconds: How long it took, from the first start to the last end.
        noise: What else the machine did meanwhile.
        results: Every worker's last line, by rank; None for one that was killed, empty where another's
            failure ended it without a word.
        server: The server's last line; None without a server.
        failed: Why training did not come to its end, after a loss that was asked for or because it
            diverged; None: it did.
    """

    run: Run
    folder: Path
    commands: Sequence[str]
    began: str
    seconds: float
    noise: Noise
    results: Sequence[Mapping[str, Any] | None]
    server: Mapping[str, Any] | None
    failed: str | None = None

    @cached_property
    def records(self) -> list[list[Line]]:
        """Every worker's reports in order, by rank."""
        return [read_record(self.folder / f"record {rank}.jsonl") for rank in range(len(self.results))]

    @property
    def diverged(self) -> bool:
        """Whether gradients or parameters ceased to be finite."""
        return divergence(self.results, self.server) is not None

    @property
    def parameters(self) -> Path:
        """File with the final parameters; a run that failed may have left none."""
        return self.folder / "parameters.safetensors"

    @property
    def early(self) -> Path:
        """File with those after `EARLY` steps; the final ones where there were fewer."""
        early = self.folder / f"parameters step{EARLY}.safetensors"
        return early if early.exists() else self.parameters

    def write(self) -> None:
        """Writes `outcome.json`, whole or not at all."""
        run = self.run
        content = {
            "label": run.label,
            "setting": to_builtins(run.setting),
            "row": run.row.name,
            "seed": run.seed,
            "turn": run.turn,
            "commands": list(self.commands),
            "began": self.began,
            "seconds": self.seconds,
            **to_builtins(self.noise),
            "results": list(self.results),
            "server": self.server,
            "failed": self.failed,
        }
        write_whole(self.folder / FILE, json.dumps(content, indent=1))


def divergence(results: Sequence[Mapping[str, Any] | None], server: Mapping[str, Any] | None) -> str | None:
    """After how many steps training diverged, and who said what; None where no last line says so.

    Args:
        results: The workers' last lines, by rank.
        server: The server's; None without a server.
    """
    for name, line in [*((f"worker {rank}", each) for rank, each in enumerate(results)), ("server", server)]:
        told = line or {}
        cause, mend, _ = str(told.get("error", "")).partition(f"; {NonFinite.mend}")
        if mend:  # which stands in no other error
            return f"diverged after {told.get('steps', 0)} steps, {name} said: {cause}"
    return None


def finished(folder: Path) -> bool:
    """Whether the run that writes there has come to its end."""
    return (folder / FILE).is_file()


def finished_at(folder: Path) -> float:
    """When it did, in seconds since the epoch."""
    return (folder / FILE).stat().st_mtime


def discard(folder: Path) -> None:
    """Makes the run there one that is not finished, so that it is made anew."""
    (folder / FILE).unlink()


def read(folder: Path, run: Run) -> Outcome:
    """What this run left in its folder.

    Raises:
        HubringError: The file is not one that `Outcome.write` wrote.
    """
    try:
        content = json.loads((folder / FILE).read_text())
        return Outcome(
            run=run,
            folder=folder,
            noise=Noise(tuple(content["load"]), content["foreign"]),
            **{
                name: content[name]
                for name in ("commands", "began", "seconds", "results", "server", "failed")
            },
        )
    except (ValueError, KeyError, TypeError) as cause:
        raise HubringError(
            f"{folder / FILE} is damaged ({cause}): delete it, and the run is repeated"
        ) from cause


def write_whole(file: Path, content: str | bytes) -> None:
    """Writes a file so that it is there with all of its content, or as it was before."""
    fresh = file.with_name(f"{file.name}.new")
    with fresh.open("wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        stream.flush()
        os.fsync(stream.fileno())
    fresh.rename(file)


def read_record(path: Path) -> list[Line]:
    """All whole reports in a record file; the last one of a killed worker may be cut.

    A metric that is no finite number, as a loss that has diverged, is left out, but for its name under
    `NOT_FINITE`: it was not measured. A worker that ended before it began has no file, and no reports.
    """
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [_finite(json.loads(line)) for line in whole.splitlines()]


def _finite(line: Line) -> Line:
    odd = [name for name, value in line.items() if isinstance(value, float) and not math.isfinite(value)]
    kept = {name: value for name, value in line.items() if name not in odd}
    return kept | {NOT_FINITE: odd} if odd else kept


def latest(path: Path) -> Line | None:
    """The newest whole report in a file that is still written; None before the first."""
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    line: Line | None = json.loads(whole[whole.rfind("\n") + 1 :]) if whole else None
    return line

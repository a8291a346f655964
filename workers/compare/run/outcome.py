"""The output of one run: a folder with its records. `outcome.json` is written last.

A run with that file is finished and is not repeated. The folder can be copied.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert, to_builtins
from msgspec.structs import FieldInfo, fields

from hubring.ps.core.errors import HubringError, NonFinite
from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.run.noise import RunNoise
from hubring.workers.compare.run.timeline import HostClock

Line = Mapping[str, Any]
"""One report of a job: `step`, `seconds` since training began, and its finite metrics."""

FILE = "outcome.json"

NOT_FINITE = "not finite"
"""Key of a report for the names of metrics that are not finite."""

CRASH = "crashed: "
"""Begins `RunOutcome.failed` of a run that a crash ended."""

EARLY = 20
"""Steps after which parameters are first saved; rounding errors are still small then."""


class RunOutcome(Struct, frozen=True, kw_only=True, dict=True):
    """A finished run.

    Attributes:
        run: The run.
        folder: Its folder.
        commands: Commands of its programs, ready to paste.
        began: Start time in ISO 8601.
        seconds: Time from the first start to the last end.
        noise: What other programs did meanwhile, on each machine.
        results: Every worker's last line, by rank; None for a worker that was killed, empty if another
            program's failure ended it before its last line.
        server: The server's last line; None without a server.
        failed: Why training did not finish, after an injected fault or divergence; None: it finished.
        clocks: The clock of each host in the run's timeline.
        script: `digest` of the user's script when the run started; empty for a built-in job.
        instead_of: What disturbed the run whose place it took; empty if there was none.
    """

    run: PlannedRun
    folder: Path
    commands: Sequence[str]
    began: str
    seconds: float
    noise: Sequence[RunNoise]
    results: Sequence[Mapping[str, Any] | None]
    server: Mapping[str, Any] | None
    failed: str | None = None
    clocks: Sequence[HostClock] = ()
    script: str = ""
    instead_of: str = ""

    @cached_property
    def records(self) -> list[list[Line]]:
        """Every worker's reports, by rank and in order."""
        return [read_record(self.folder / f"record {rank}.jsonl") for rank in range(len(self.results))]

    @property
    def crashed(self) -> bool:
        """Whether a program crashed, so that other seeds count without this run."""
        return self.failed is not None and self.failed.startswith(CRASH)

    @property
    def diverged(self) -> bool:
        """Whether training has no end to compare: a number stopped being finite, or a program crashed."""
        return self.crashed or divergence(self.results, self.server) is not None

    @property
    def unseen(self) -> str:
        """Why the gate cannot check what the script did; empty if it can."""
        return next((each["unseen"] for each in self.results if each and each.get("unseen")), "")

    @property
    def parameters(self) -> Path:
        """File of the final parameters; it can be missing after a failed run."""
        return self.folder / "parameters.safetensors"

    @property
    def early(self) -> Path:
        """File of the parameters after `EARLY` steps; the final ones if there were fewer steps."""
        early = self.folder / f"parameters step{EARLY}.safetensors"
        return early if early.exists() else self.parameters

    def write(self) -> None:
        """Writes `outcome.json` atomically."""
        run = self.run
        content = {
            "label": run.label,
            "setting": to_builtins(run.setting),
            "row": run.row.name,
            "seed": run.seed,
            "turn": run.turn,
            **{each.name: to_builtins(getattr(self, each.name)) for each in _kept()},
        }
        write_whole(self.folder / FILE, json.dumps(content, indent=1))


def _kept() -> tuple[FieldInfo, ...]:
    """Returns the fields that the file has as they are: those after the run and its folder."""
    return fields(RunOutcome)[2:]


def divergence(results: Sequence[Mapping[str, Any] | None], server: Mapping[str, Any] | None) -> str | None:
    """Returns after how many steps training diverged and which program reported it; None if none did.

    Args:
        results: Last lines of the workers, by rank.
        server: Last line of the server; None without a server.
    """
    for name, line in [*((f"worker {rank}", each) for rank, each in enumerate(results)), ("server", server)]:
        report = line or {}
        cause, fix, _ = str(report.get("error", "")).partition(f"; {NonFinite.fix}")
        if fix:  # no other error contains it
            return f"diverged after {report.get('steps', 0)} steps; {name} reported: {cause}"
    return None


def disturbed(outcomes: Mapping[str, RunOutcome]) -> dict[str, str]:
    """Returns what disturbed runs, by label. Clock rates of one machine in equal runs are compared."""
    heard = [
        (label, (one.run.setting.key, one.run.row.name, each.machine), each)
        for label, one in outcomes.items()
        for each in one.noise
    ]
    fastest, found = defaultdict[Hashable, float](float), dict[str, str]()
    for _, equal, each in heard:
        fastest[equal] = max(fastest[equal], each.megahertz or 0.0)
    for label, equal, each in heard:
        if why := each.disturbance(fastest[equal]):
            found.setdefault(label, why)
    return found


def crash(run: PlannedRun, folder: Path, cause: str) -> RunOutcome:
    """Writes the outcome of a run that a crash ended."""
    began, ranks = datetime.now(UTC).isoformat(), run.row.workers(run.setting.workers)
    known: dict[str, Any] = {"commands": (), "began": began, "seconds": 0.0, "noise": (), "server": None}
    known |= {"results": [{}] * ranks, "failed": CRASH + cause.partition(";")[0]}
    found = RunOutcome(run=run, folder=folder, **known)
    found.write()
    return found


def digest(script: Path | None) -> str:
    """Returns the SHA-256 of a script; empty if there is none."""
    return hashlib.sha256(script.read_bytes()).hexdigest() if script is not None and script.is_file() else ""


def audit_file(folder: Path, rank: int) -> Path:
    """Returns the file of a worker's sampled steps in a run's folder."""
    return folder / f"audit {rank}.msgpack"


def finished(folder: Path) -> bool:
    """Whether the run of this folder is finished."""
    return (folder / FILE).is_file()


def discard(folder: Path) -> None:
    """Marks the run as not finished, so that it is repeated."""
    (folder / FILE).unlink()


def read(folder: Path, run: PlannedRun) -> RunOutcome:
    """Reads the outcome of a run.

    Raises:
        HubringError: The file is damaged.
    """
    try:
        content = json.loads((folder / FILE).read_text())
        kept = {each.name: convert(content[each.name], each.type) for each in _kept() if each.name in content}
        return RunOutcome(run=run, folder=folder, **kept)
    except (ValueError, KeyError, TypeError, ValidationError) as cause:
        raise HubringError(f"{folder / FILE} is damaged ({cause}); delete it to repeat the run") from cause


def write_whole(file: Path, content: str | bytes) -> None:
    """Writes a file atomically: afterwards it has the old content or all of the new content."""
    fresh = file.with_name(f"{file.name}.new")
    with fresh.open("wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        stream.flush()
        os.fsync(stream.fileno())
    fresh.rename(file)


def read_record(path: Path) -> list[Line]:
    """Returns all complete reports of a record file; the last report of a killed worker can be cut off.

    Metrics that are not finite are removed and their names listed under `NOT_FINITE`. A worker that ended
    before training has no file and no reports.
    """
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [_finite(json.loads(line)) for line in whole.splitlines()]


def _finite(line: Line) -> Line:
    odd = [name for name, value in line.items() if isinstance(value, float) and not math.isfinite(value)]
    finite = {name: value for name, value in line.items() if name not in odd}
    return finite | {NOT_FINITE: odd} if odd else finite


def latest(path: Path) -> Line | None:
    """Returns the newest complete report of a file that is still written; None before the first."""
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    line: Line | None = json.loads(whole[whole.rfind("\n") + 1 :]) if whole else None
    return line

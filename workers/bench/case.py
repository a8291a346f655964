"""Times one exchange on all rows, in turns.

The processes of all rows run at the same time on one host. In each round every row has a turn of a few
steps, while the other rows are blocked. Each round starts with another row. The first round is a warm-up and
does not count.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hubring.ps.core.errors import UsageError
from hubring.ps.job.sharding import SLICE_BYTES
from hubring.workers.bench import shapes
from hubring.workers.bench.job import Job
from hubring.workers.bench.report.table import Entry, entry, trained
from hubring.workers.bench.rows.row import ROWS, Row
from hubring.workers.bench.shapes import Shape
from hubring.workers.bench.team import Team, Turn
from hubring.workers.compare.run import machine
from hubring.workers.compare.run.process import Processes
from hubring.workers.compare.run.runner import clean_environment

TURN_SECONDS = 0.6
"""Maximum length of a turn, so that slow rows do not take most of the bench's time."""


class Case(NamedTuple):
    """The number of ranks, the shape and the optimizer of an exchange."""

    n: int
    shape: str
    optimizer: str

    def __str__(self) -> str:
        return f"{self.n} rank{'s' * (self.n > 1)}, {self.shape}, {self.optimizer}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a run.

    Attributes:
        rows: The rows, in the table's order.
        rounds: Turns of every row that count.
        steps: Steps per turn; None: the shape's default, fewer for slow rows.
        shards: Shards of a hub without colocated shards; None: the row's default.
        megabytes: Size of the shape `flat` in MiB.
        bucket_bytes: Bucket size in bytes.
        timeout: Seconds within which all rows of a case must finish.
        stamp: An entry's `machine`, `date` and `commit`.
    """

    rows: Sequence[Row]
    rounds: int
    steps: int | None
    shards: int | None
    megabytes: int
    bucket_bytes: int
    timeout: float
    stamp: Mapping[str, str]

    def run(self, case: Case) -> list[Entry]:
        """Times a case, and returns one entry for each row.

        Raises:
            UsageError: No row supports the case.
            ProcessFailed: A process failed. The message holds the end of its log.
            DeadlineExceeded: The case took longer than the timeout.
        """
        with ExitStack() as stack:
            # A short prefix: the path of a socket can have at most 107 characters.
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            environment = clean_environment(_threads(case))
            processes = stack.enter_context(Processes(place, environment, self.timeout))
            teams = [self._team(row, case, place, processes) for row in self._taking_part(case)]
            for team in teams:
                team.start()
            for team in teams:
                team.meet()
            turns = self._rounds(teams, shapes.find(case.shape).steps)
            _end(teams, processes)
        entries = [self._entry(team, case, own) for team, own in zip(teams, turns, strict=True)]
        return trained(entries, shapes.SAMPLES[case.shape]) if shapes.find(case.shape).trained else entries

    def _taking_part(self, case: Case) -> list[Row]:
        rows = [row for row in self.rows if takes_part(row, shapes.find(case.shape))]
        if not rows:
            names = ", ".join(row.name for row in self.rows)
            raise UsageError(
                f"--rows {names}: none of these rows supports the shape {case.shape}; remove --rows"
            )
        return rows

    def _team(self, row: Row, case: Case, place: Path, processes: Processes) -> Team:
        directory = place / row.name
        directory.mkdir()
        job = Job(
            shape=case.shape,
            optimizer=case.optimizer,
            size=case.n,
            directory=str(directory),
            megabytes=self.megabytes,
            bucket_bytes=self.bucket_bytes,
            slice_bytes=SLICE_BYTES,
            codec=row.codec,
            device=row.device,
        )
        return Team(row, job, self.shards, processes, self.timeout)

    def _rounds(self, teams: Sequence[Team], steps: int) -> list[list[Turn]]:
        """Returns every team's turns without the first, which sets the number of steps of the others."""
        warm = [team.turn(self.steps or steps) for team in teams]
        lengths = [self.steps or fitting(turn, steps) for turn in warm]
        turns: list[list[Turn]] = [[] for _ in teams]
        for number in range(1, 1 + self.rounds):
            for place in range(len(teams)):
                which = (number + place) % len(teams)
                turns[which].append(teams[which].turn(lengths[which]))
        return turns

    def _entry(self, team: Team, case: Case, turns: Sequence[Turn]) -> Entry:
        return entry(
            [each for turn in turns for each in turn.seconds],
            n=case.n,
            nbytes=shapes.nbytes(case.shape, self.megabytes),
            row=team.row.name,
            shape=case.shape,
            optimizer=case.optimizer,
            wrong=sum(turn.wrong for turn in turns),
            shards=team.shards,
            transport=team.row.transport,
            codec=team.row.codec,
            bucket_bytes=self.bucket_bytes if team.row.in_buckets(shapes.find(case.shape)) else 0,
            threads=_threads(case),
            idle_cores=team.idle_cores,
            **self.stamp,
        )


def takes_part(row: Row, shape: Shape) -> bool:
    """Whether a row supports a shape. Compressed rows run only with the rows of the same wire."""
    if shape.trained:
        return bool(row.training) and not row.codec
    if shape.coded:
        return row.wire in {each.wire for each in ROWS.values() if each.codec}
    return bool(row.side) and not row.codec


def fitting(warm: Turn, steps: int) -> int:
    """Returns the number of steps that fit into a turn, at least one."""
    return max(1, min(steps, round(TURN_SECONDS / min(warm.seconds))))


def _threads(case: Case) -> int:
    """Returns the threads of each process: one rank's share of the cores."""
    return max(1, machine.cores() // case.n)


def _end(teams: Sequence[Team], processes: Processes) -> None:
    for team in teams:
        team.dismiss()
    while processes.running():
        processes.pause("the end of the bench")

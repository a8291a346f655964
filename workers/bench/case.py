"""Times one exchange on all rows, in turns.

The processes of all rows that fit into memory run at the same time on one host. In each round every row has
a turn of a few steps, while the other rows are blocked. Each round starts with another row. The first round
is a warm-up and does not count.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hubring.ps.core.errors import UsageError
from hubring.ps.job.sharding import SLICE_BYTES, runs_within
from hubring.workers.bench import job
from hubring.workers.bench.job import BenchJob, ModelShape
from hubring.workers.bench.row import NAME_WIDTH, ROWS, BenchRow
from hubring.workers.bench.team import BenchTeam, BenchTurn, shards_of
from hubring.workers.peers import machine
from hubring.workers.peers.nccl_tests import algbw, busbw
from hubring.workers.peers.processes import RunProcesses, clean_environment

HEAD = (
    f"{'row':<{NAME_WIDTH}}{'n':>3}{'shape':>14}{'size':>11}{'count':>10}{'type':>6}{'redop':>6}{'step':>5}"
    f"{'time':>9}{'min':>9}{'spread':>9}{'N':>6}{'algbw':>7}{'busbw':>7}{'#wrong':>8}\n"
    f"{'':<{NAME_WIDTH}}{'':>3}{'':>14}{'(B)':>11}{'(elements)':>10}{'':>6}{'':>6}{'':>5}"
    f"{'(ms)':>9}{'(ms)':>9}{'(ms)':>9}{'':>6}{'(GB/s)':>7}{'(GB/s)':>7}{'':>8}"
)


@dataclass(frozen=True, slots=True)
class BenchEntry:
    """The times of a row for one step: average gradients, step the optimizer, return parameters to all ranks.

    Attributes:
        row: Name of the row.
        n: Number of ranks.
        shape: Name of the shape.
        optimizer: `sgd` (momentum 0.9) or `adam`.
        bytes: Size of the model.
        median_ms: Median of all steps of all turns; the time of a step is that of its slowest rank.
        min_ms: Time of the fastest step.
        spread_ms: Time of the slowest step minus that of the fastest.
        steps: Number of steps.
        algbw: bytes / median, in 1e9 bytes per second.
        busbw: algbw x 2(n-1)/n, the bytes that each rank of a ring sends, as in nccl-tests.
        wrong: Elements that differ from torch's own result, summed over ranks and turns. End to end: that are
            far from the result of one process; with compression: that are far from torch's result.
        shards: Shards of the hub; 0 without a hub.
        transport: Transport to the hub; empty without a hub.
        codec: Codec of the gradients; empty: no compression.
        bucket_bytes: Bucket size; 0 for a row without buckets of this size.
        threads: Threads of torch in each rank; each process of a server or a limit has one thread.
        idle_cores: Cores that the row used during the turns of other rows.
        samples_per_s: End to end: samples per second of all ranks together.
        exposed_ms: End to end: time of the step minus the time of a step without exchange.
        machine: Description of the machine.
        date: ISO 8601 date.
        commit: Commit of the measured code; empty without git.
    """

    row: str
    n: int
    shape: str
    optimizer: str
    bytes: int
    median_ms: float
    min_ms: float
    spread_ms: float
    steps: int
    algbw: float
    busbw: float
    wrong: int
    shards: int = 0
    transport: str = ""
    codec: str = ""
    bucket_bytes: int = 0
    threads: int = 1
    idle_cores: float = 0.0
    samples_per_s: float = 0.0
    exposed_ms: float = 0.0
    machine: str = ""
    date: str = ""
    commit: str = ""

    def as_json(self) -> dict[str, Any]:
        """Returns the entry as a JSON object, with numbers rounded to six digits."""
        return {name: _short(value) for name, value in asdict(self).items()}

    def __str__(self) -> str:
        head = f"{self.row:<{NAME_WIDTH}}{self.n:>3}{self.shape:>14}"
        size = f"{self.bytes:>11}{self.bytes // 4:>10}{'float':>6}{'avg':>6}{self.optimizer:>5}"
        times = "".join(f"{_digits(each):>9}" for each in (self.median_ms, self.min_ms, self.spread_ms))
        bandwidth = f"{self.algbw:>7.2f}{self.busbw:>7.2f}"
        return f"{head}{size}{times}{self.steps:>6}{bandwidth}{self.wrong:>8}"


def bench_entry(seconds: Sequence[float], *, n: int, nbytes: int, **rest: Any) -> BenchEntry:
    """Returns the entry of one row.

    Args:
        seconds: Time of every step that counts.
        n: Number of ranks.
        nbytes: Size of the model.
        rest: The other fields of `BenchEntry`.
    """
    middle = median(seconds)
    return BenchEntry(
        n=n,
        bytes=nbytes,
        median_ms=1e3 * middle,
        min_ms=1e3 * min(seconds),
        spread_ms=1e3 * (max(seconds) - min(seconds)),
        steps=len(seconds),
        algbw=algbw(nbytes, middle),
        busbw=busbw(nbytes, middle, n),
        **rest,
    )


def trained(entries: Sequence[BenchEntry], samples: int) -> list[BenchEntry]:
    """Returns the entries with `samples_per_s` and `exposed_ms`.

    Args:
        entries: All rows of one case.
        samples: Samples of one rank in one step.
    """
    alone = [each.median_ms for each in entries if each.row == "train-alone"]
    return [
        replace(
            each,
            samples_per_s=1e3 * samples * each.n / each.median_ms,
            exposed_ms=each.median_ms - alone[0] if alone else 0.0,
        )
        for each in entries
    ]


def _digits(milliseconds: float) -> str:
    """Formats with three decimals below 10 ms, where rows differ by microseconds."""
    return f"{milliseconds:.3f}" if milliseconds < 10 else f"{milliseconds:.1f}"


def _short(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value


TURN_SECONDS = 0.6
"""Maximum length of a turn, so that slow rows do not take most of the bench's time."""


class BenchCase(NamedTuple):
    """The number of ranks, the shape and the optimizer of an exchange."""

    n: int
    shape: str
    optimizer: str

    def __str__(self) -> str:
        return f"{self.n} rank{'s' * (self.n > 1)}, {self.shape}, {self.optimizer}"


@dataclass(frozen=True, slots=True)
class BenchPlan:
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

    rows: Sequence[BenchRow]
    rounds: int
    steps: int | None
    shards: int | None
    megabytes: int
    bucket_bytes: int
    timeout: float
    stamp: Mapping[str, str]

    def run(self, case: BenchCase) -> list[BenchEntry]:
        """Times a case, and returns one entry for each row.

        Raises:
            UsageError: No row supports the case.
            ProcessFailed: A process failed. The message holds the end of its log.
            DeadlineExceeded: The case took longer than the timeout.
        """
        rows = self._taking_part(case)
        nbytes, trains = job.shape_bytes(case.shape, self.megabytes), job.find_shape(case.shape).trained
        needs = {row: row_bytes(row, case.n, self.shards, nbytes, trains=trains) for row in rows}
        total, free = sum(needs.values()), machine.free_bytes()
        groups = runs_within(rows, free, needs.__getitem__)
        if len(groups) > 1:
            print(
                f"{len(rows)} rows need about {total / 1e9:.0f} GB of memory, and {free / 1e9:.0f} GB"
                f" are free: {len(groups)} groups of rows take turns, one group after the other",
                file=sys.stderr,
            )
        entries = [each for group in groups for each in self._run(group, case)]
        return trained(entries, job.SAMPLES[case.shape]) if trains else entries

    def _run(self, rows: Sequence[BenchRow], case: BenchCase) -> list[BenchEntry]:
        with ExitStack() as stack:
            # A short prefix: the path of a socket can have at most 107 characters.
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            environment = clean_environment(_threads(case))
            processes = stack.enter_context(RunProcesses(place, environment, self.timeout))
            teams = [self._team(row, case, place, processes) for row in rows]
            for team in teams:
                team.start()
            for team in teams:
                team.meet()
            turns = self._rounds(teams, job.find_shape(case.shape).steps)
            for team in teams:
                team.dismiss()
            while processes.running():
                processes.pause("the end of the bench")
        return [self._entry(team, case, own) for team, own in zip(teams, turns, strict=True)]

    def _taking_part(self, case: BenchCase) -> list[BenchRow]:
        rows = [row for row in self.rows if takes_part(row, job.find_shape(case.shape))]
        if not rows:
            names = ", ".join(row.name for row in self.rows)
            raise UsageError(f"--rows {names}: none of these has the shape {case.shape}; remove --rows")
        return rows

    def _team(self, row: BenchRow, case: BenchCase, place: Path, processes: RunProcesses) -> BenchTeam:
        directory = place / row.name
        directory.mkdir()
        job = BenchJob(
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
        return BenchTeam(row, job, self.shards, processes)

    def _rounds(self, teams: Sequence[BenchTeam], steps: int) -> list[list[BenchTurn]]:
        """Returns every team's turns without the first, which sets the number of steps of the others."""
        warm = [team.turn(self.steps or steps) for team in teams]
        lengths = [self.steps or fitting(turn, steps) for turn in warm]
        turns: list[list[BenchTurn]] = [[] for _ in teams]
        for number in range(1, 1 + self.rounds):
            for place in range(len(teams)):
                which = (number + place) % len(teams)
                turns[which].append(teams[which].turn(lengths[which]))
        return turns

    def _entry(self, team: BenchTeam, case: BenchCase, turns: Sequence[BenchTurn]) -> BenchEntry:
        return bench_entry(
            [each for turn in turns for each in turn.seconds],
            n=case.n,
            nbytes=job.shape_bytes(case.shape, self.megabytes),
            row=team.row.name,
            shape=case.shape,
            optimizer=case.optimizer,
            wrong=sum(turn.wrong for turn in turns),
            shards=team.shards,
            transport=team.row.transport,
            codec=team.row.codec,
            bucket_bytes=self.bucket_bytes if team.row.in_buckets(job.find_shape(case.shape)) else 0,
            threads=_threads(case),
            idle_cores=team.idle_cores,
            **self.stamp,
        )


PROCESS_BYTES = 150 << 20
"""Memory of a row's process beside its models."""
MODELS = 4
"""Copies of the model in each process: parameters, gradients, the optimizer's state, and a buffer."""
TRAINED_MODELS = 8
"""The same in training: also what is on the way during backward, and a model that checks the result."""


def row_bytes(row: BenchRow, n: int, shards: int | None, nbytes: int, *, trains: bool = False) -> int:
    """Returns about how much memory a row takes, in bytes.

    Args:
        row: The row.
        n: Number of ranks.
        shards: As in `BenchPlan`.
        nbytes: Size of the model.
        trains: Whether a process does whole training steps.
    """
    processes = (row.members or n) + shards_of(row, n, shards)
    return processes * (PROCESS_BYTES + (TRAINED_MODELS if trains else MODELS) * nbytes)


def takes_part(row: BenchRow, shape: ModelShape) -> bool:
    """Whether a row supports a shape. Compressed rows run only with the rows of the same wire."""
    if shape.trained:
        return bool(row.training) and not row.codec
    if shape.coded:
        return row.wire in {each.wire for each in ROWS.values() if each.codec}
    return bool(row.side) and not row.codec


def fitting(warm: BenchTurn, steps: int) -> int:
    """Returns the number of steps that fit into a turn, at least one."""
    return max(1, min(steps, round(TURN_SECONDS / min(warm.seconds))))


def _threads(case: BenchCase) -> int:
    """Returns the threads of each process: one rank's share of the cores."""
    return max(1, machine.cores() // case.n)

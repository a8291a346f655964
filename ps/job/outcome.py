"""How jobs end: the outcome, its counters, what the last workers of uneven batches get, and the verdict.

Law: a job has one verdict. It is known once the job is over and its last checkpoint is written, or could
not be written.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hubring.ps.core.bounds import Rejections
from hubring.ps.core.types import Member
from hubring.ps.job.membership import FormerMember


class LeaveReason(enum.IntEnum):
    """Why a worker left; numbers as in control.proto."""

    FINISHED = 0
    PREEMPTED = 1
    FAILED = 2
    DIVERGED = 3
    """It found a NaN or an infinity, so no other worker can continue."""
    REFUSED = 4
    """Hubring refused its step. In lockstep its gradients may be in the others' next step."""


@dataclass(slots=True)
class JobOutcome:
    """How a job ended, for the server's last line."""

    finished: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    broke: bool = False
    """The job failed. Some workers may have finished before."""
    erred: bool = False
    """A worker failed before the job did: its script raised an error. A restart does not help."""
    departures: Counter[str] = field(default_factory=Counter)
    """Departures by the field names above. A rank that is lost twice counts twice."""

    def leave(self, way: str, rank: int, text: str = "") -> None:
        """Records that a worker left.

        Args:
            way: One of the field names above.
            rank: The worker's rank.
            text: Why the worker failed or was lost.
        """
        self.departures[way] += 1
        known = getattr(self, way)
        if isinstance(known, dict):
            known[rank] = text
        elif rank not in known:
            known.append(rank)

    @property
    def ok(self) -> bool:
        return bool(self.finished) and not self.broke

    @property
    def summary(self) -> str:
        """How many workers left in each way, in words."""
        counts = {
            "finished": len(self.finished),
            "stopped on request": len(self.preempted),
            "failed": len(self.failed),
            "lost": len(self.lost),
        }
        return ", ".join(f"{count} {how}" for how, count in counts.items() if count or how == "finished")

    @property
    def was_preempted(self) -> bool:
        """Whether the job stopped on request, and for no other reason."""
        return bool(self.preempted) and not (self.finished or self.failed or self.broke)


RESULTS = ("finished", "preempted", "failed")
"""How a job ends."""
DEPARTURE_WAYS = ("finished", "preempted", "failed", "lost")
"""How a worker leaves a job: the names in `JobOutcome.departures`."""


class JobCounters:
    """Counts since the server started. A job's own counts end with the job.

    Attributes:
        rejections: What the server refused.
        jobs: Jobs by result.
        workers: Departures from jobs that are over.
        counted: The outcome of the last job that is over; its workers are in the counts.
    """

    def __init__(self) -> None:
        self.rejections = Rejections()
        self.jobs: Counter[str] = Counter()
        self.workers: Counter[str] = Counter()
        self.counted: JobOutcome | None = None

    def close(self, outcome: JobOutcome) -> None:
        """Counts a job that is over."""
        broken_off = "preempted" if outcome.was_preempted else "failed"
        self.jobs["finished" if outcome.ok else broken_off] += 1
        self.leave(outcome)

    def leave(self, outcome: JobOutcome) -> None:
        """Counts the workers of a job that never started."""
        self.workers.update(outcome.departures)
        self.counted = outcome

    def counts(self, latest: JobOutcome) -> dict[str, dict[str, int]]:
        """Returns jobs by result and workers by departure, including zeros, and rejections by reason.

        Args:
            latest: The outcome of the current or last job.
        """
        workers = self.workers.copy()
        if latest is not self.counted:
            workers.update(latest.departures)
        return {
            "jobs": {result: self.jobs[result] for result in RESULTS},
            "workers": {way: workers[way] for way in DEPARTURE_WAYS},
            "refused": self.rejections.counts(),
        }


UNEVEN_FIX = (
    "If ranks have different numbers of batches, pass uneven=True to DistributedOptimizer on all ranks, and"
    " call optimizer.join() after the last batch"
)


class FirstFinish(NamedTuple):
    """The first worker that finished, after `step` completed steps."""

    member: Member
    step: int

    @property
    def ends_rest(self) -> str:
        """The error where the others cannot step without it: on a ring, and where a hub only averages."""
        return f"{self}, so no rank can take step {self.step + 1}. {UNEVEN_FIX}"

    @property
    def warning(self) -> str:
        """The warning where a hub steps without it."""
        return f"{self}; the other ranks go on without it, with the mean of their gradients. {UNEVEN_FIX}"

    def __str__(self) -> str:
        return f"{self.member} finished after {self.step} steps"


@dataclass(frozen=True, slots=True)
class JobVerdict:
    """How one job ended.

    Attributes:
        job: The job's name.
        summary: How its workers left, in words.
        error: Why the job failed, or has no last checkpoint; empty if neither.
        exit_code: The exit code of `error`.
    """

    job: str
    summary: str
    error: str = ""
    exit_code: int = 0

    def __str__(self) -> str:
        how = f"failed: {self.error}" if self.error else f"finished ({self.summary})"
        return f"job {self.job!r} is over: it {how}"


EndedJob = tuple[Mapping[int, FormerMember], JobVerdict]
"""The former workers of a job, by incarnation, and how it ended."""

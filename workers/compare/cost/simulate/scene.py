"""What is simulated, and what came of it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.cost.model.exchange_terms import Way
from hubring.workers.compare.experiment.setting import Fault
from hubring.workers.slowdown.straggler import Straggler

LEASE_SECONDS = 5.0
"""Of silence, until a hub counts a worker as lost (`ps-server --lease`)."""


class Scene(Struct, frozen=True, kw_only=True):
    """Workers that compute, exchange, and wait by a rule.

    Attributes:
        workers: How many.
        way: What one exchange asks of whom.
        compute: Seconds a step, the same for all.
        rule: Who waits for whom. `ring` and `bsp`: all for all; `backup`: for all but some; `ssp`:
            nobody leads by more than the staleness; `asp`: nobody waits.
        staleness: Of ssp.
        backup: Workers that a round does not wait for.
        straggler: Who is slow; None: nobody.
        fault: Who is lost; None: nobody.
        lease: Seconds that pass until the others know.
        steps: Of each worker on average.
        seed: Of all draws.
    """

    workers: int
    way: Way
    compute: float = 0.0
    rule: Literal["ring", "bsp", "backup", "ssp", "asp"] = "bsp"
    staleness: int = 0
    backup: int = 0
    straggler: Straggler | None = None
    fault: Fault | None = None
    lease: float = LEASE_SECONDS
    steps: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if self.fault is not None and self.workers == 1 and self.rule != "ring":
            raise UsageError(f"{self.fault}: with one worker nobody is left; take 2 at least")


class Course(Struct, frozen=True, kw_only=True):
    """How it went.

    Attributes:
        step_seconds: Median time between two steps of a worker.
        steps_per_second: Of all workers together.
        seconds: Simulated.
        exchanges: That went over the wire, dropped ones too.
        dropped: Gradients that came too late for their round.
        busy: Seconds that the servers' links moved bytes, each way.
        lead: Most completed steps by which one worker was ever ahead of another.
        staleness: Updates by others between a worker's read and its own update, on average.
        finished: Whether all steps were taken; a ring ends with its first loss.
    """

    step_seconds: float
    steps_per_second: float
    seconds: float
    exchanges: int
    dropped: int = 0
    busy: float = 0.0
    lead: int = 0
    staleness: float = 0.0
    finished: bool = True

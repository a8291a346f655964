"""Input and result of a simulation."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.cost.model.exchange_terms import Way
from hubring.workers.compare.experiment.setting import Fault
from hubring.workers.slowdown.straggler import Straggler

LEASE_SECONDS = 5.0
"""Seconds of silence after which a hub counts a worker as lost (`ps-server --lease`)."""


class Scene(Struct, frozen=True, kw_only=True):
    """Workers that compute, exchange, and wait by a rule.

    Attributes:
        workers: Number of workers.
        way: Load of one exchange.
        compute: Seconds a step, the same for all.
        rule: Which workers wait for each other. `ring` and `bsp`: all for all; `backup`: all for all but
            some; `ssp`: no worker leads by more than the staleness; `asp`: no worker waits.
        staleness: Bound of ssp.
        backup: Number of workers that a round does not wait for.
        straggler: The slow workers; None: none.
        fault: The worker that is lost; None: none.
        lease: Seconds until the others notice a loss.
        steps: Mean steps of a worker.
        seed: Seed of all draws.
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
            raise UsageError(f"{self.fault} with one worker leaves no worker; expected at least 2 workers")


class Course(Struct, frozen=True, kw_only=True):
    """Result of a simulation.

    Attributes:
        step_seconds: Median time between two steps of a worker.
        steps_per_second: Of all workers together.
        seconds: Simulated time.
        exchanges: Number of exchanges, with dropped ones.
        dropped: Number of gradients that arrived too late for their round.
        busy: Seconds that the servers' links moved bytes, each way.
        lead: Most completed steps by which one worker was ahead of another.
        staleness: Updates by other workers between a worker's read and its own update, on average.
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

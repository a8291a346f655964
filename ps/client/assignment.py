"""What a worker learns of the plan of its job."""

from __future__ import annotations

from dataclasses import dataclass

from hubring.ps.core.types import ShardPlan


@dataclass(frozen=True, slots=True)
class Assignment:
    """The coordinator's answer to this worker's buckets."""

    plan: ShardPlan
    step: int
    initialised: bool
    undecided: bool = False
    """There is no plan yet: the workers must measure which slice size is fastest."""

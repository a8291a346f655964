"""A worker's progress."""

from __future__ import annotations

from dataclasses import dataclass, field

from hubring.ps.job.step_rate import StepRate
from hubring.ps.job.telemetry import Telemetry


@dataclass(slots=True)
class Progress:
    """What a worker reported last."""

    step: int = 0
    loss: float = float("nan")
    heard: float = 0.0
    waiting: float = 0.0
    """Seconds that the worker had been blocked when it sent the report."""
    step_rate: StepRate = field(default_factory=StepRate)
    sample_rate: StepRate = field(default_factory=StepRate)
    telemetry: Telemetry = field(default_factory=Telemetry)

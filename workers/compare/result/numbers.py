"""The names of all numbers of a row; `hubring.workers.compare.judge.measure` says what each of them is."""

from __future__ import annotations

SPEEDS = (
    "samples_per_second",
    "step_ms",
    "step_mean_ms",
    "seconds_to_target",
    "seconds",
    "compute_ms",
    "exposed_ms",
    "hidden_ms",
    "read_wait_ms",
    "queue_ms",
    "apply_ms",
    "cpu_ms_per_step",
)
"""What is not shown of a row that computed something else than it should have."""

NAMES = (
    *SPEEDS,
    "samples_to_target",
    "final_loss",
    "final_metric",
    "bytes_sent_per_step",
    "bytes_received_per_step",
    "staleness_mean",
    "staleness_max",
    "memory_mb",
)

WORST = ("staleness_max",)
"""What is the most over pushes, and so over runs: a median of such would hide it."""

"""Names of all numbers of a row; `hubring.workers.compare.judge.measure` defines them."""

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
    "record_ms",
    "pause_seconds",
    "price_per_epoch",
    "price_to_target",
)
"""Numbers that are withheld if a row computed something else than it should."""

NAMES = (
    *SPEEDS,
    "samples_to_target",
    "lost_steps",
    "final_loss",
    "final_metric",
    "bytes_sent_per_step",
    "bytes_received_per_step",
    "staleness_mean",
    "staleness_max",
    "memory_mb",
)

WORST = ("staleness_max",)
"""Numbers for which the largest value of all runs counts; a median would hide it."""

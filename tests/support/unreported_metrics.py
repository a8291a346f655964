"""Metrics that a plain job without a GPU, strangers or a ring that heals does not export."""

from __future__ import annotations

UNREPORTED = (
    "ps_progress_ratio",
    "ps_left_seconds",
    "ps_worker_samples_total",
    "ps_worker_gpu_memory_bytes",
    "ps_shard_gpu_memory_bytes",
    "ps_refused_total",
    "ps_shard_refused_total",
    "ps_ring_generation",
    "ps_ring_pause_seconds",
)

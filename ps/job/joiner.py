"""A worker that asks to join a job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Joiner:
    """A worker that asks to join. None for `rank` or `world_size` accepts any value."""

    token: str
    job: str
    topology: str
    host: str
    pid: int
    rank: int | None = None
    world_size: int | None = None
    min_workers: int = 0
    """Members with which a ring continues after a loss; 0: a ring ends with its first loss."""
    brings_shard: bool = False
    """Whether the worker has started the shard that `--colocate` requires."""

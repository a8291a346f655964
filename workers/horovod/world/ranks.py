"""Rank and size functions. Each raises ValueError before `init`."""

from __future__ import annotations

from hubring.workers.horovod.world.world import current


def rank() -> int:
    """Returns this process's rank, from 0 to `size() - 1`."""
    return current().rank


def size() -> int:
    """Returns the number of ranks."""
    return current().size


def local_rank() -> int:
    """Returns this process's rank among the processes on its host."""
    return current().neighbourhood.local_rank


def local_size() -> int:
    """Returns the number of processes on this host."""
    return current().neighbourhood.local_size


def cross_rank() -> int:
    """Returns this host's index among the hosts with this local rank."""
    return current().neighbourhood.cross_rank


def cross_size() -> int:
    """Returns the number of hosts with this local rank."""
    return current().neighbourhood.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of processes."""
    return current().neighbourhood.is_homogeneous

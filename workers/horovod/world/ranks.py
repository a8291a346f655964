"""Where this process stands among the others; each raises ValueError before `init`."""

from __future__ import annotations

from hubring.workers.horovod.world.world import current


def rank() -> int:
    """This process's rank, from 0 to `size() - 1`."""
    return current().rank


def size() -> int:
    """How many processes take part."""
    return current().size


def local_rank() -> int:
    """This process's rank among those on its host."""
    return current().neighbourhood.local_rank


def local_size() -> int:
    """How many processes are on this host."""
    return current().neighbourhood.local_size


def cross_rank() -> int:
    """This host's place among the hosts that have such a local rank."""
    return current().neighbourhood.cross_rank


def cross_size() -> int:
    """How many hosts have such a local rank."""
    return current().neighbourhood.cross_size


def is_homogeneous() -> bool:
    """Whether every host has as many processes."""
    return current().neighbourhood.is_homogeneous

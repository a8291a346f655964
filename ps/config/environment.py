"""This process's environment: nobody else reads it or writes to it."""

from __future__ import annotations

import os
from collections.abc import Mapping


def environment() -> dict[str, str]:
    """A copy of the process's environment, for whoever looks for a launcher or starts a process."""
    return dict(os.environ)


def become(variables: Mapping[str, str]) -> None:
    """Makes `variables` this process's environment: for a fork that stands for a fresh process."""
    os.environ.clear()
    os.environ.update(variables)


def export(variables: Mapping[str, str]) -> None:
    """Adds to this process's environment what a script expects to find there."""
    os.environ.update(variables)


def spare_forks() -> None:
    """Keeps gRPC from stopping its threads at every fork, unless the environment says otherwise.

    A DataLoader's workers are forks, and none of them speaks gRPC. gRPC reads
    this when it is first imported, so that must come later.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def rest_threads() -> None:
    """Lets torch's threads sleep between loops, unless the environment says otherwise.

    They would look for work for some milliseconds after each. libgomp reads
    this when torch is first imported, so that must come later; a child inherits it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

"""This process's environment. No other module reads or writes it."""

from __future__ import annotations

import os
from collections.abc import Mapping

SILENT_GRPC = {"GRPC_VERBOSITY": "NONE"}
"""Keeps gRPC's own log off a listener's standard error.

gRPC would write a line, with text of the peer, for each TLS handshake that fails: any peer could fill a disk.
Errors that concern this program are raised.
"""


def environment() -> dict[str, str]:
    """Returns a copy of the process's environment."""
    return dict(os.environ)


def take(name: str) -> str:
    """Removes a variable, so that no child process gets it; returns its value, or an empty string."""
    return os.environ.pop(name, "")


def become(variables: Mapping[str, str]) -> None:
    """Replaces this process's environment, for a fork that acts as a new process."""
    os.environ.clear()
    os.environ.update(variables)


def export(variables: Mapping[str, str]) -> None:
    """Adds variables to this process's environment, for a script that expects them."""
    os.environ.update(variables)


def spare_forks() -> None:
    """Disables gRPC's fork support, which stops its threads at every fork, unless the environment sets it.

    DataLoader workers are forks, and none of them uses gRPC. Call this before the first import of gRPC,
    which reads the variable.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def silence_grpc() -> None:
    """Sets SILENT_GRPC, unless the environment has another value.

    Call this before the first import of gRPC, which reads the variable.
    """
    for name, value in SILENT_GRPC.items():
        os.environ.setdefault(name, value)


def rest_threads() -> None:
    """Lets torch's threads sleep between loops, unless the environment sets OMP_WAIT_POLICY.

    By default they spin for some milliseconds after each loop. Call this before the first import of torch:
    libgomp reads the variable then. Child processes inherit it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def let_nccl_heal() -> None:
    """Sets what a ring over NCCL needs so that it can go on after the loss of a member.

    Operations that fail raise errors where they are waited for; otherwise torch has a watchdog, which ends
    the process. Unless an environment variable is set, a communicator makes all connections for collectives
    in its first operation: a later one must not wait for a lost member when it is started. Call this before
    other threads run, because torch and NCCL read the variables without a lock. They also hold for groups
    that the script makes.
    """
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")

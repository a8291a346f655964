"""What a task reports about itself and its machine."""

from __future__ import annotations

import os
import socket

from hubring.ps.config.address import is_loopback
from hubring.ps.config.environment import environment
from hubring.ps.core.host_id import name_kernel
from hubring.ps.transport.host import numeric, reachable, towards
from hubring.workers.compare.cluster.messages import Hello
from hubring.workers.compare.cluster.task import Task
from hubring.workers.compare.run import machine, noise

_MASTER = "MASTER_ADDR"
"""Set by launchers of torch's kind to rank 0's address."""


def describe(task: Task, conductor: str | None) -> Hello:
    """Returns a task's first message.

    Args:
        task: This process's task.
        conductor: The conductor's address; None: this is the conductor.
    """
    return Hello(
        rank=task.rank,
        size=task.size,
        local_rank=task.local_rank,
        host=socket.gethostname(),
        boot=name_kernel(),
        idle=noise.is_idle(),
        address=_address(task) if conductor is None else towards(conductor),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        machine=dict(machine.describe()),
    )


def _address(task: Task) -> str:
    """Returns the conductor's address for the others; loopback if all are on one machine."""
    if task.together:
        return "127.0.0.1"
    master = environment().get(_MASTER)
    own = "" if master is None else towards(master)
    return numeric(reachable("")) if not own or is_loopback(own) else own

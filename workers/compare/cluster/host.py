"""What a task says of itself and of its machine."""

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
"""Where launchers of torch's kind say on which network rank 0 is reached."""


def describe(task: Task, conductor: str | None) -> Hello:
    """A task's first word.

    Args:
        task: This process's place.
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
    """Under which the others reach the conductor; where all are on one machine, nobody else does."""
    if task.together:
        return "127.0.0.1"
    master = environment().get(_MASTER)
    own = "" if master is None else towards(master)
    return numeric(reachable("")) if not own or is_loopback(own) else own

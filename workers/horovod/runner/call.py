"""One process of `horovod.run`: gets a function by a pipe, calls it, and answers.

python -m hubring.workers.horovod.runner.call FD PARENT

It does not outlive PARENT, which started it: the kernel then sends it SIGTERM.
"""

from __future__ import annotations

import sys
import traceback
from multiprocessing.connection import Connection
from typing import NamedTuple

import cloudpickle

from hubring.ps.config.environment import export
from hubring.ps.job.job import Reason
from hubring.ps.process.end_with_parent import follow
from hubring.workers.horovod import alias
from hubring.workers.runtime import context


class Circumstances(NamedTuple):
    """Where the caller's modules are found, and what the process is to find in its environment."""

    path: list[str]
    variables: dict[str, str]


def answer(pipe: Connection) -> None:
    """Takes the circumstances, then the call, which can be read only in those."""
    there = Circumstances(*pipe.recv())
    sys.path[:] = there.path
    export(there.variables)
    alias.install()
    try:
        func, args, kwargs = cloudpickle.loads(pipe.recv_bytes())
        told = cloudpickle.dumps((True, func(*args, **kwargs)))
        context.shutdown()
        pipe.send_bytes(told)
    except BaseException as error:
        context.shutdown(Reason.FAILED, str(error))
        pipe.send_bytes(cloudpickle.dumps((False, traceback.format_exc())))


if __name__ == "__main__":
    follow(int(sys.argv[2]))
    answer(Connection(int(sys.argv[1])))

"""One process of `horovod.run`: receives a function through a pipe, calls it, and sends the result.

python -m hubring.workers.horovod.runner.call FD PARENT

The process does not outlive PARENT, which started it: when PARENT ends, the kernel sends SIGTERM.
"""

from __future__ import annotations

import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle

from hubring.ps.config.environment import export
from hubring.ps.job.job import Reason
from hubring.ps.process.end_with_parent import follow
from hubring.workers.horovod import alias
from hubring.workers.runtime import context


class Answer(NamedTuple):
    """How a call ended: the result, or the traceback; and whether the worker was part of the job."""

    well: bool
    result: Any
    joined: bool


class Circumstances(NamedTuple):
    """The caller's `sys.path`, and the environment variables to set."""

    path: list[str]
    variables: dict[str, str]


def answer(pipe: Connection) -> None:
    """Receives the circumstances, which are needed to unpickle the call, then the call; sends the result."""
    there = Circumstances(*pipe.recv())
    sys.path[:] = there.path
    export(there.variables)
    alias.install()
    try:
        func, args, kwargs = cloudpickle.loads(pipe.recv_bytes())
        result = func(*args, **kwargs)
        ended = cloudpickle.dumps(tuple(Answer(True, result, context.started() is not None)))
        context.shutdown()
        pipe.send_bytes(ended)
    except BaseException as error:
        context.shutdown(Reason.FAILED, str(error))
        pipe.send_bytes(cloudpickle.dumps(tuple(Answer(False, traceback.format_exc(), True))))


if __name__ == "__main__":
    follow(int(sys.argv[2]))
    answer(Connection(int(sys.argv[1])))

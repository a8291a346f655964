"""One process of `hubring.launch`: receives a function through a pipe, calls it, and sends the result.

python -m hubring.workers.localrun.call FD PARENT

The process does not outlive PARENT, which started it: when PARENT ends, the kernel sends SIGTERM.
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
from hubring.workers.runtime import context


class Circumstances(NamedTuple):
    """The caller's `sys.path`, and the environment variables to set."""

    path: list[str]
    variables: dict[str, str]


class Answer(NamedTuple):
    """How a call ended.

    Attributes:
        well: Whether the function returned.
        result: What it returned, or its traceback.
        joined: Whether the function joined the job.
    """

    well: bool
    result: object
    joined: bool


def answer(pipe: Connection) -> None:
    """Receives the circumstances, which are needed to unpickle the call, then the call; sends the answer."""
    there = Circumstances(*pipe.recv())
    sys.path[:] = there.path
    export(there.variables)
    try:
        function, args, kwargs = cloudpickle.loads(pipe.recv_bytes())
        result = function(*args, **kwargs)
        sent = cloudpickle.dumps(tuple(Answer(True, result, _joined())))
        context.shutdown()
    except BaseException as error:
        sent = cloudpickle.dumps(tuple(Answer(False, traceback.format_exc(), _joined())))
        context.shutdown(Reason.FAILED, str(error))
    pipe.send_bytes(sent)


def _joined() -> bool:
    return context.started() is not None or bool(context.result())


if __name__ == "__main__":
    follow(int(sys.argv[2]))
    answer(Connection(int(sys.argv[1])))

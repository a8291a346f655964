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
from hubring.ps.job.outcome import LeaveReason
from hubring.ps.process.launch import end_with_parent
from hubring.workers.runtime import context


class CallerContext(NamedTuple):
    """The caller's `sys.path`, and the environment variables to set."""

    path: list[str]
    variables: dict[str, str]


class CallAnswer(NamedTuple):
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
    sys.path[:], variables = CallerContext(*pipe.recv())
    export(variables)
    try:
        function, args, kwargs = cloudpickle.loads(pipe.recv_bytes())
        result = function(*args, **kwargs)
        sent = cloudpickle.dumps(tuple(CallAnswer(True, result, _joined())))
        context.shutdown()
    except BaseException as error:
        sent = cloudpickle.dumps(tuple(CallAnswer(False, traceback.format_exc(), _joined())))
        context.shutdown(LeaveReason.FAILED, str(error))
    pipe.send_bytes(sent)


def _joined() -> bool:
    return context.started() is not None or bool(context.result())


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    answer(Connection(int(sys.argv[1])))

"""One process of `horovod.run`: gets a function by a pipe, calls it, and answers.

python -m workers.horovod.call FD
"""

from __future__ import annotations

import sys
import traceback
from multiprocessing.connection import Connection
from multiprocessing.spawn import import_main_path
from typing import NamedTuple

from ps.config import export
from ps.job import Reason
from workers import context
from workers.horovod import alias


class Circumstances(NamedTuple):
    """Where the caller's functions are found, and what the process is to find in its environment."""

    path: list[str]
    main: str | None
    variables: dict[str, str]


def answer(pipe: Connection) -> None:
    """Takes the circumstances, then the call, which can be read only in those."""
    there = Circumstances(*pipe.recv())
    sys.path[:] = there.path
    export(there.variables)
    alias.install()
    try:
        if there.main is not None:
            import_main_path(there.main)  # as multiprocessing does, for functions of the script itself
        func, args, kwargs = pipe.recv()
        result = func(*args, **kwargs)
        context.shutdown()
        pipe.send((True, result))
    except BaseException as error:
        context.shutdown(Reason.FAILED, str(error))
        pipe.send((False, traceback.format_exc()))


if __name__ == "__main__":
    answer(Connection(int(sys.argv[1])))

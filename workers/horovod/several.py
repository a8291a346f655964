"""`horovod.run`: a function on several processes of this machine, called from a script."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from ps.config import environment
from workers.horovod.call import Circumstances
from workers.launcher import host
from workers.launcher.server import Server


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    verbose: bool = False,
    *,
    np: int | None = None,
    topology: str = "hub",
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
) -> list[Any]:
    """Calls a function on several workers, and returns what each of them returned.

    Args:
        func: Calls `hvd.init()` itself. Of a module, not defined within another function: each
            worker is a fresh process that imports it.
        args: Its arguments, as far as they can be pickled.
        kwargs: Likewise.
        num_proc: How many workers.
        hosts: `localhost:SLOTS`; this machine is the only one.
        hostfile: The same as a file.
        start_timeout: Seconds in which all must have started.
        verbose: Show the server's log.
        np: The older name of `num_proc`.
        topology: `hub` or `ring`.
        use_gloo: Without effect: a ring runs on Gloo.
        use_mpi: Must not be true.

    Returns:
        The results in rank order.

    Raises:
        ValueError: MPI is asked for.
        UsageError: The hosts are other machines, or have no room.
        RuntimeError: A worker failed; the text holds its traceback.
    """
    if use_mpi:
        raise ValueError("use_mpi=True: there is no MPI here; leave it out")
    size, limit = _size(num_proc or np, hosts, hostfile), start_timeout or 300.0
    with Server(size, [], environment(), verbose=verbose, timeout=limit) as server:
        told = {"PS_SERVER": server.address, "PS_TOPOLOGY": topology, "PS_TIMEOUT": str(limit)}
        told["PS_WORLD_SIZE"] = str(size)
        places = [{**told, "PS_RANK": str(rank), "PS_LOCAL_RANK": str(rank)} for rank in range(size)]
        call = (func, tuple(args), dict(kwargs or {}))
        return _collect([_Caller(place, call) for place in places])


def _size(num_proc: int | None, hosts: str | None, hostfile: str | None) -> int:
    room = host.slots(hosts) if hosts else host.slots_in(Path(hostfile)) if hostfile else None
    if room is not None and num_proc is not None and num_proc > room:
        raise ValueError(f"num_proc is {num_proc}, and the hosts have {room} slot(s)")
    return num_proc or room or 1


class _Caller:
    """One worker process, and the pipe to it."""

    def __init__(self, variables: dict[str, str], call: tuple[Any, ...]) -> None:
        self.pipe, there = Pipe()
        command = [sys.executable, "-m", "workers.horovod.call", str(there.fileno())]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()])
        there.close()
        main = getattr(sys.modules["__main__"], "__file__", None)
        self.pipe.send(tuple(Circumstances(list(sys.path), main, variables)))
        self.pipe.send(call)


def _collect(callers: list[_Caller]) -> list[Any]:
    """Every worker's result; the first failure ends all."""
    ranks = {caller.pipe: rank for rank, caller in enumerate(callers)}
    results: list[Any] = [None] * len(callers)
    try:
        while ranks:
            for pipe in wait(list(ranks)):
                assert isinstance(pipe, Connection)
                rank = ranks.pop(pipe)
                results[rank] = _result(rank, pipe)
        return results
    except BaseException:
        for caller in callers:
            caller.process.terminate()
        raise
    finally:
        for caller in callers:
            caller.process.wait()
            caller.pipe.close()


def _result(rank: int, pipe: Connection) -> Any:
    try:
        well, result = pipe.recv()
    except EOFError as cause:
        raise RuntimeError(f"rank {rank} was ended before it returned") from cause
    if not well:
        raise RuntimeError(f"rank {rank} failed:\n{result}")
    return result

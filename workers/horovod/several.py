"""`horovod.run`: a function on several processes of this machine, called from a script."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ps.config import environment, export
from ps.job import Reason
from workers import context
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
        places = [{**told, "PS_RANK": str(rank), "PS_WORLD_SIZE": str(size)} for rank in range(size)]
        calls = [(place, func, tuple(args), dict(kwargs or {})) for place in places]
        return _collect([_start(*call) for call in calls])


def _size(num_proc: int | None, hosts: str | None, hostfile: str | None) -> int:
    room = host.slots(hosts) if hosts else host.slots_in(Path(hostfile)) if hostfile else None
    if room is not None and num_proc is not None and num_proc > room:
        raise ValueError(f"num_proc is {num_proc}, and the hosts have {room} slot(s)")
    return num_proc or room or 1


def _start(
    place: dict[str, str], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[BaseProcess, Connection]:
    spawn = multiprocessing.get_context("spawn")  # a fork would copy this process's threads' locks
    here, there = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_work, args=(there, place, func, args, kwargs), daemon=True)
    process.start()
    there.close()
    return process, here


def _work(
    answer: Connection,
    place: dict[str, str],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    from workers.horovod import alias

    alias.install()
    export({**place, "PS_LOCAL_RANK": place["PS_RANK"]})
    try:
        result = func(*args, **kwargs)
        context.shutdown()
        answer.send((True, result))
    except BaseException as error:
        context.shutdown(Reason.FAILED, str(error))
        answer.send((False, traceback.format_exc()))


def _collect(workers: list[tuple[BaseProcess, Connection]]) -> list[Any]:
    """Every worker's result; the first failure ends all."""
    places = {answer: rank for rank, (_, answer) in enumerate(workers)}
    results: list[Any] = [None] * len(workers)
    try:
        while places:
            for answer in wait(list(places)):
                assert isinstance(answer, Connection)
                rank = places.pop(answer)
                results[rank] = _result(rank, answer)
        return results
    except BaseException:
        for process, _ in workers:
            process.terminate()
        raise
    finally:
        for process, answer in workers:
            process.join()
            answer.close()


def _result(rank: int, answer: Connection) -> Any:
    try:
        well, result = answer.recv()
    except EOFError as cause:
        raise RuntimeError(f"rank {rank} was ended before it returned") from cause
    if not well:
        raise RuntimeError(f"rank {rank} failed:\n{result}")
    return result

"""`horovod.run`: a script calls a function in several processes on this machine."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from hubring.ps.config.environment import environment
from hubring.ps.core.errors import UsageError
from hubring.workers.horovod import alias
from hubring.workers.horovod.world import Neighbourhood, variables
from hubring.workers.localrun import command_line, functions
from hubring.workers.localrun.settings import settle


def call(pickled: bytes) -> Any:
    """Provides Horovod's names, which are needed to unpickle the function, then calls it."""
    alias.install()
    function, args, kwargs = cloudpickle.loads(pickled)
    return function(*args, **kwargs)


def run(  # noqa: D417 - the other arguments have no effect
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[int, int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    topology: str = "hub",
) -> list[Any]:
    """Calls a function in several workers on this machine, and returns the result of each.

    Arguments that are not listed below are accepted as in Horovod, and have no effect.

    Args:
        func: The function, which can call `hvd.init()`; cloudpickle must be able to pickle it. HOROVOD_RANK
            and the like are set.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.
        num_proc: Number of workers.
        min_num_proc: At most `num_proc`. It has no other effect: all workers must succeed.
        max_num_proc: At least `num_proc`. It has no other effect.
        slots: Slots of a host without a number.
        hosts: `localhost:SLOTS`; other machines are not supported.
        hostfile: A file with hosts.
        host_discovery_script: A program that prints hosts; it runs once.
        start_timeout: Seconds within which the server and all workers must start.
        output_filename: Folder for the workers' output, as rank.N/stdout and rank.N/stderr.
        verbose: Whether to show the server's log.
        use_mpi: Must not be true.
        executable: The Python interpreter of the workers.
        np: The older name of `num_proc`; `min_np` and `max_np` likewise.
        topology: `hub` or `ring`.

    Returns:
        The results in rank order.

    Raises:
        ValueError: Arguments contradict each other, or `use_mpi` is true.
        UsageError: The hosts are other machines, or have too few slots.
        RuntimeError: A worker failed. The message holds its traceback.
    """
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi are both set; remove one of them")
    if use_mpi:
        raise ValueError("use_mpi=True: Hubring has no MPI; remove use_mpi")
    size = _renamed("np", "num_proc", np, num_proc)
    least = _renamed("min_np", "min_num_proc", min_np, min_num_proc)
    _check_sizes(size, least, _renamed("max_np", "max_num_proc", max_np, max_num_proc))
    if hosts is not None and hostfile is not None:
        raise ValueError("hosts= and hostfile= are both set; remove one of them")
    room = command_line.host_slots(hosts, hostfile, host_discovery_script, slots or 1)
    if room is not None and size > room:
        raise UsageError(f"num_proc={size}: the hosts have only {room} slot(s); add slots or reduce num_proc")
    limit = start_timeout or 300.0
    settings = settle({"topology": topology, "timeout": limit}, size, environment())
    task: functions.Task[Any] = call, (cloudpickle.dumps((func, tuple(args), dict(kwargs or {}))),), {}
    return functions.call(
        task,
        size,
        settings,
        timeout=limit,
        verbose=bool(verbose),
        outputs=output_filename,
        program=executable or sys.executable,
        variables=lambda rank: variables(rank, size, Neighbourhood(rank, size)),
    )


def _renamed(old: str, new: str, older: int | None, value: Any) -> Any:
    if older is None:
        return value
    warnings.warn(f"{old} is deprecated, use {new} instead", DeprecationWarning, stacklevel=3)
    return older


def _check_sizes(size: int, least: int | None, most: int | None) -> None:
    if size < 1 or (least is not None and least > size) or (most is not None and most < size):
        raise ValueError(
            f"num_proc={size}, min_num_proc={least}, max_num_proc={most}: expected"
            " 1 <= min_num_proc <= num_proc <= max_num_proc"
        )

"""Horovod's basics: `init`, `shutdown`, the timeline, ranks and sizes, build options, and small helpers.

The functions for ranks and sizes raise ValueError before `init`. Hubring has no MPI. The ring runs on
torch's Gloo and NCCL; the hub needs neither. `HorovodBasics` has the functions that do not depend on a
framework, as methods of one object.
"""

from __future__ import annotations

import atexit
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from packaging.version import parse

from hubring.ps.config.environment import become, environment, export
from hubring.workers import collectives
from hubring.workers.communicators.base import Communicator
from hubring.workers.horovod import world as worlds
from hubring.workers.horovod.collectives import operation
from hubring.workers.horovod.collectives.handles import Timeline
from hubring.workers.horovod.errors import HorovodInternalError, translated
from hubring.workers.horovod.world import (
    HorovodWorld,
    Neighbourhood,
    ProcessSet,
    add_process_set,
    current,
    neighbourhood,
    variables,
)
from hubring.workers.launchers.placement import Placement
from hubring.workers.runtime import context

T = TypeVar("T")


def mpi_threads_supported() -> bool:
    """Raises ValueError, as Horovod does without MPI.

    Raises:
        ValueError: Always.
    """
    raise ValueError("Hubring has no MPI; use a hub, or a ring on Gloo or NCCL")


def mpi_built(verbose: bool = False) -> bool:
    """Returns False, since Hubring has no MPI, and uses neither IBM's DDL nor Intel's oneCCL."""
    return False


mpi_enabled = ddl_built = ccl_built = mpi_built
"""Return False, as `mpi_built` does."""


def gloo_built(verbose: bool = False) -> bool:
    """Whether this torch has Gloo, so that a ring can run on it."""
    return dist.is_available() and dist.is_gloo_available()


gloo_enabled = gloo_built
"""Whether a ring can run on Gloo."""


def nccl_built(verbose: bool = False) -> int:
    """Returns NCCL's version as a number, for example 22105 for 2.21.5; 0 if this torch has no NCCL."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    version: tuple[int, ...] = torch.cuda.nccl.version()
    return version[0] * 10000 + version[1] * 100 + version[2]


def cuda_built(verbose: bool = False) -> bool:
    """Whether this torch was built for CUDA."""
    return torch.backends.cuda.is_built() and torch.version.cuda is not None


def rocm_built(verbose: bool = False) -> bool:
    """Whether this torch was built for ROCm."""
    return torch.version.hip is not None


def rank() -> int:
    """Returns this process's rank, from 0 to `size() - 1`."""
    return current().rank


def size() -> int:
    """Returns the number of ranks."""
    return current().size


def local_rank() -> int:
    """Returns this process's rank among the processes on its host."""
    return current().neighbourhood.local_rank


def local_size() -> int:
    """Returns the number of processes on this host."""
    return current().neighbourhood.local_size


def cross_rank() -> int:
    """Returns this host's index among the hosts with this local rank."""
    return current().neighbourhood.cross_rank


def cross_size() -> int:
    """Returns the number of hosts with this local rank."""
    return current().neighbourhood.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of processes."""
    return current().neighbourhood.is_homogeneous


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Joins the job. All ranks must call this; a second call has no effect. After an error, call it again.

    Args:
        comm: None, or the list of all ranks. Use process sets for a part of the ranks.
        process_sets: Process sets to add; "dynamic" adds none.

    Raises:
        ValueError: `comm` is something else, or a process set cannot be added. A second call adds none.
        HorovodInternalError: Another rank is lost, or has called `join` and waits there.
        HubringError: This worker cannot join (`hubring.workers.runtime.context.init`).
    """
    sets = () if process_sets is None or isinstance(process_sets, str) else process_sets
    if worlds.started() is not None:
        _check_added(sets)
        return
    ended = worlds.latest()
    if ended is not None and ended.membership is not None:  # within elastic training
        ended.active = True
        ended.membership.adopt()
    else:
        here = context.init()
        begin(here.communicator, here.placement)
        atexit.register(_end_timeline)  # few scripts call shutdown()
    timeline = environment().get("HOROVOD_TIMELINE", "")
    if timeline and timeline.upper() != "DYNAMIC":
        start_timeline(timeline)
    try:
        _check_comm(comm)
        for process_set in sets:
            add_process_set(process_set)
    except Exception:
        shutdown()  # or the next call would have no effect
        raise


def shutdown() -> None:
    """Ends this world. All ranks can call `init` again. Does nothing without a world.

    The worker remains in the job until the script ends, since a worker that left could not rejoin. Within
    elastic training, `init` continues with the workers that are left.
    """
    world = worlds.started()
    if world is None:
        return
    stop_timeline()
    for process_set in world.process_sets.values():
        process_set.forget()
    world.active = False


def is_initialized() -> bool:
    """Whether `init` was called."""
    return worlds.started() is not None


def begin(communicator: Communicator, placement: Placement, *, thread: bool = False) -> HorovodWorld:
    """Creates a world on a communicator. Ranks that start together exchange their hosts."""
    members = tuple(range(communicator.size))
    world = HorovodWorld(communicator, _look_around(communicator, placement), members)
    worlds.enter(world, thread=thread)
    if not thread:
        export(variables(world.rank, world.size, world.neighbourhood))
    return world


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts to record the operations of rank 0 in a file; other ranks write no file.

    Args:
        file_path: The file, which is overwritten.
        mark_cycles: Accepted, but has no effect: operations start immediately, not in cycles.

    Raises:
        ValueError: `init` was not called.
    """
    world = current()
    stop_timeline()
    if world.rank == 0:
        world.timeline = Timeline(Path(file_path))


def stop_timeline() -> None:
    """Stops recording, and ends the file.

    Raises:
        ValueError: `init` was not called.
    """
    world = current()
    timeline, world.timeline = world.timeline, None
    if timeline is not None:
        timeline.close()


def _end_timeline() -> None:
    if is_initialized():
        stop_timeline()


def _check_added(process_sets: Iterable[ProcessSet]) -> None:
    new = [str(one) for one in process_sets if one.process_set_id is None]
    if new:
        raise ValueError(
            f"init was called before, and added no {', '.join(new)}; use hvd.add_process_set, or call"
            " hvd.shutdown() first"
        )


def _check_comm(comm: Any) -> None:
    if comm is None or (isinstance(comm, Iterable) and sorted(comm) in ([], list(range(current().size)))):
        return
    raise ValueError(
        f"init(comm={comm!r}): expected None or the list of all ranks; Hubring has no MPI communicators;"
        " use hvd.ProcessSet for a part of the ranks"
    )


def _look_around(communicator: Communicator, placement: Placement) -> Neighbourhood:
    if communicator.size == 1 or communicator.late:  # a late worker missed the exchange
        return Neighbourhood(placement.local_rank, placement.local_size, placement.node_rank)
    mine = torch.tensor([[communicator.rank, zlib.crc32(socket.gethostname().encode())]], device="cpu")
    with translated():
        rows = collectives.allgather(mine, "horovod.hosts", communicator=communicator)
    hosts: dict[int, int] = dict(rows.tolist())
    lost = sorted(set(range(communicator.size)) - hosts.keys())
    if lost:
        raise HorovodInternalError(
            f"init: rank(s) {', '.join(map(str, lost))} of {communicator.size} are lost; restart the job, or"
            " use hvd.elastic.run to continue without them"
        )
    return neighbourhood(communicator.rank, list(hosts.values()))


def check_extension(ext_name: str, *_: Any) -> None:
    """Accepts `horovod.torch`.

    Raises:
        ImportError: The extension is for another framework.
    """
    if ext_name != "horovod.torch":
        raise ImportError(f"Hubring does not provide the extension {ext_name}; it provides horovod.torch")


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Accepts any version, since nothing here is compiled for a version."""


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework is supported; only torch is."""
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether torch finds a GPU."""
    return ext_base_name == "torch" and torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether Adasum works with this number of ranks."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether the version `ver` is `target` or later.

    Raises:
        ValueError: `target` is not of the form major.minor.patch, or an argument is not a string.
    """
    if not isinstance(ver, str) or not isinstance(target, str) or target.count(".") != 2:
        raise ValueError(
            f"versions {ver!r} and {target!r}: expected strings, the second as major.minor.patch"
        )
    return parse(ver) >= parse(target)


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """Returns a function that gets the reduction from `op`, or from the older `average`.

    Args:
        reduce_ops: Accepted, but has no effect: the constants are always `hvd.Average` and so on.
    """
    return operation.chosen


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Sets environment variables within a block; None leaves a variable unchanged."""
    earlier = environment()
    export({name: value for name, value in variables.items() if value is not None})
    try:
        yield
    finally:
        become(earlier)


def is_iterable(value: Any) -> bool:
    """Whether the value is iterable."""
    return isinstance(value, Iterable)


def split_list(values: list[T], parts: int) -> list[list[T]]:
    """Splits a list into `parts` pieces whose lengths differ by at most 1."""
    each, rest = divmod(len(values), parts)
    starts = [index * each + min(index, rest) for index in range(parts + 1)]
    return [values[start:end] for start, end in pairwise(starts)]


def check_build() -> str:
    """Returns the available features in the layout of `horovodrun --check-build`."""
    both = {"MPI": mpi_built(), "Gloo": gloo_built()}
    gpus: dict[str, int] = {"NCCL": nccl_built(), "DDL": ddl_built(), "CCL": ccl_built()}
    parts: dict[str, dict[str, int]] = {
        "Available Frameworks": {"TensorFlow": False, "PyTorch": True, "MXNet": False},
        "Available Controllers": {"Hub": True, **both},
        "Available Tensor Operations": {"Hub": True, **gpus, **both},
    }
    lines = ["Horovod v0.28.1's API on Hubring:"]
    for title, found in parts.items():
        marks = [f"    [{'X' if there else ' '}] {name}" for name, there in found.items()]
        lines += ["", f"{title}:", *marks]
    return "\n".join(lines)


_OPS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
_FUNCTIONS = (
    *("init", "shutdown", "is_initialized", "start_timeline", "stop_timeline"),
    *("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous"),
    *("mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built", "nccl_built"),
    *("ddl_built", "ccl_built", "cuda_built", "rocm_built"),
)


class HorovodBasics:
    """Horovod's world for one framework's extension. All objects show the same world.

    Args:
        pkg_path: Accepted, but has no effect: there is no compiled extension to load.
        args: As `pkg_path`.
    """

    vars().update({name: getattr(operation, name) for name in _OPS})
    vars().update({name: staticmethod(globals()[name]) for name in _FUNCTIONS})

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, pkg_path: str = "", *args: Any) -> None: ...

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Returns the ranks of every process set by its number; 0 is the set of all ranks."""
        added = {one.process_set_id: list(ranks) for ranks, one in current().process_sets.items()}
        numbered = {number: ranks for number, ranks in added.items() if number is not None}
        return {0: worlds.global_process_set.ranks, **numbered}

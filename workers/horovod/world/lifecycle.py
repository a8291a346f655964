"""`init` and `shutdown`: the world's beginning and its end."""

from __future__ import annotations

import atexit
import socket
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from hubring.ps.config.environment import environment, export
from hubring.workers import collectives
from hubring.workers.communicators.base import Communicator
from hubring.workers.horovod.errors import translated
from hubring.workers.horovod.timeline import Timeline
from hubring.workers.horovod.world import world as worlds
from hubring.workers.horovod.world.hosts import Neighbourhood, neighbourhood
from hubring.workers.horovod.world.process_set import ProcessSet, add_process_set
from hubring.workers.horovod.world.variables import variables
from hubring.workers.horovod.world.world import World, current
from hubring.workers.launchers.placement import Placement
from hubring.workers.runtime import context


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Finds this worker its place; all ranks call it, and a second call changes nothing.

    Args:
        comm: All ranks, as a list, or None; for some of them there are process sets.
        process_sets: Sets to add at once; "dynamic" adds none.

    Raises:
        ValueError: `comm` is something else, or a set cannot be added.
        HubringError: There is no place; says why. (`hubring.workers.runtime.context.init`)
    """
    if worlds.started() is not None:
        return
    here = context.init()
    begin(here.communicator, here.placement)
    _begin_timeline()
    atexit.register(_end_timeline)  # few scripts call shutdown()
    _check_comm(comm)
    if process_sets is not None and not isinstance(process_sets, str):
        for process_set in process_sets:
            add_process_set(process_set)


def shutdown() -> None:
    """Ends this world; all ranks may `init` another. Without a world it does nothing.

    The place in the job is kept until the script ends, as nobody could take it back.
    """
    world = worlds.started()
    if world is None:
        return
    _end_timeline()
    for process_set in world.process_sets.values():
        process_set.forget()
    worlds.enter(None)


def is_initialized() -> bool:
    """Whether there is a world."""
    return worlds.started() is not None


def begin(communicator: Communicator, placement: Placement, *, thread: bool = False) -> World:
    """Makes a world on a communicator; ranks that began together learn each other's hosts."""
    members = tuple(range(communicator.size))
    world = World(communicator, _look_around(communicator, placement), members)
    worlds.enter(world, thread=thread)
    if not thread:
        export(variables(world.rank, world.size, world.neighbourhood))
    return world


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Notes every operation of rank 0 in a file from now on; the other ranks write none.

    Args:
        file_path: Where it is written; it replaces what is there.
        mark_cycles: Accepted, and without effect: operations begin at once here, not in cycles.

    Raises:
        ValueError: `init` was not called.
    """
    world = current()
    stop_timeline()
    if world.rank == 0:
        world.timeline = Timeline(Path(file_path), world.rank)


def stop_timeline() -> None:
    """Ends the file.

    Raises:
        ValueError: `init` was not called.
    """
    world = current()
    timeline, world.timeline = world.timeline, None
    if timeline is not None:
        timeline.close()


def _begin_timeline() -> None:
    path = environment().get("HOROVOD_TIMELINE", "")
    if path and path.upper() != "DYNAMIC":
        start_timeline(path)


def _end_timeline() -> None:
    world = worlds.started()
    if world is not None and world.timeline is not None:
        world.timeline.close()


def _check_comm(comm: Any) -> None:
    if comm is None or (isinstance(comm, Iterable) and sorted(comm) in ([], list(range(current().size)))):
        return
    raise ValueError(
        f"init(comm={comm!r}): a job has all ranks of its launcher here, and no MPI communicators;"
        " for some of the ranks make a hvd.ProcessSet"
    )


def _look_around(communicator: Communicator, placement: Placement) -> Neighbourhood:
    if communicator.size == 1 or communicator.late:  # the others are past this
        return Neighbourhood(placement.local_rank, placement.local_size, placement.node_rank)
    host = torch.tensor([zlib.crc32(socket.gethostname().encode())])
    with translated():
        hosts = collectives.allgather(host, "horovod.hosts", communicator=communicator)
    return neighbourhood(communicator.rank, hosts.tolist())

"""Joins the job of a torch.distributed world, and leaves it.

The hub is the one at PS_SERVER, or at the address of `init_method="hubring://HOST:PORT"`. Without either,
rank 0 starts one, which ends with the job, and announces it in the world's store. The world's first group
joins; its last one leaves.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlparse

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined] # torch does not list them
from torch.distributed.distributed_c10d import Store
from torch.optim.optimizer import register_optimizer_step_post_hook

from hubring.ps.config.environment import environment
from hubring.ps.config.sources import load_worker
from hubring.ps.config.values import address as split
from hubring.ps.config.values import is_loopback
from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.core.torch_internals import keep_compiler_out
from hubring.ps.job.outcome import LeaveReason
from hubring.ps.observe import logs
from hubring.ps.process.launch import PARENT_VARIABLE
from hubring.ps.security import token_file
from hubring.ps.security.guard import Role
from hubring.ps.transport.host import host_id, towards
from hubring.workers.communicators.base import Communicator
from hubring.workers.launchers.placement import Placement
from hubring.workers.localrun.server import LocalServer
from hubring.workers.runtime import context
from hubring.workers.runtime.worker import Worker

START_SECONDS = 120.0
"""The least time for the start, also in a group whose operations have less."""


class JobPlace(NamedTuple):
    """A group's place in the job.

    Attributes:
        communicator: Connects this process to the job.
        ranks: The members' ranks in the job, in the group's order.
    """

    communicator: Communicator
    ranks: tuple[int, ...]


class _World:
    """What this process has joined. One for each process, as torch.distributed's."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.ranks: tuple[int, ...] = ()
        """torch.distributed's ranks, by rank in the job."""
        self.groups = 0
        self.joined = False
        """Whether this module joined, and not the script."""
        self.server: LocalServer | None = None
        self.counts = False
        """Whether the steps of the script's optimizers are counted."""


_world = _World()


def enter(store: Store, ranks: Sequence[int], own: int, timeout: float) -> JobPlace:
    """Returns a group's place. The first group joins the job.

    Args:
        store: The group's store.
        ranks: The members' ranks in torch.distributed's world.
        own: This process's rank in the group.
        timeout: Seconds that an exchange may take.

    Raises:
        UsageError: The group has a rank that the first group did not have.
        HubringError: The job cannot be joined.
    """
    with _world.lock:
        if not _world.groups:
            _join(store, len(ranks), own, timeout)
            _world.ranks = tuple(ranks)
        communicator = context.current().communicator
        if missing := set(ranks) - set(_world.ranks):
            raise UsageError(
                f"ranks {sorted(missing)} are not in this process's first group over hubring, which has ranks"
                f" {list(_world.ranks)}: make a group of all ranks first"
            )
        _world.groups += 1
        return JobPlace(communicator, tuple(map(_world.ranks.index, ranks)))


def leave(error: str = "") -> None:
    """Ends a group. After the last one, leaves the job: once all ranks have, or at once with an error."""
    with _world.lock:
        _world.groups -= 1
        if _world.groups or not _world.joined:
            return
        _world.joined = False
        try:
            context.shutdown(LeaveReason.FAILED if error else LeaveReason.FINISHED, error)
        finally:
            _end_server()


def _join(store: Store, size: int, own: int, timeout: float) -> None:
    """Makes `context.current()` this process's worker, with the rank of the first group."""
    if context.started() is None:
        if not context.is_prepared():  # otherwise the launcher leaves: a job ends when all have
            _prepare(store, size, own, timeout)
            _world.joined = True
        context.init(aggregate=True)
        _check_effects(context.current())
    if not _world.counts:
        _world.counts = True
        keep_compiler_out()
        register_optimizer_step_post_hook(context.count_step)
    communicator = context.current().communicator
    if (communicator.rank, communicator.size) != (own, size):
        raise ConfigError(
            f"torch.distributed has rank {own} of {size}, but this worker is rank {communicator.rank} of"
            f" {communicator.size} in its job: start all ranks with one launcher"
        )


def _check_effects(worker: Worker) -> None:
    """Raises ConfigError if the job has settings that a script's own optimizers would not follow."""
    settings = {"--compress": worker.config.compress}
    if worker.session is not None and worker.communicator.topology == "hub":
        settings["--mode"] = worker.session.mode if worker.session.mode != "bsp" else None
    for name, value in settings.items():
        if value is not None:
            raise ConfigError(
                f"{name} {value} has no effect on groups of torch.distributed, whose ranks step by"
                f" themselves: remove {name}, or use hubring.DistributedOptimizer"
                " (workers/examples/FROM_DDP.md)"
            )


def _prepare(store: Store | None, size: int, own: int, timeout: float, server: str | None = None) -> None:
    flags: dict[str, object] = {"server": server, "timeout": max(timeout, START_SECONDS)}
    if store is not None and load_worker({}).server is None:
        store = own_part(store, own)
        flags |= _start_hub(store, size) if own == 0 else _find_hub(store, own)
    placement = Placement(rank=own, size=size, launcher="torch.distributed")
    config = load_worker({**flags, "accelerator": "cpu", "rank": own, "world_size": size})
    context.prepare(config, logs.LogOrigin(), Path(sys.argv[0]).name, placement)


def own_part(store: Store, own: int) -> Store:
    """Returns the part of a store for a new job or group. An earlier one may have used the same store.

    All members call it equally often.
    """
    return PrefixStore(f"hubring/{store.add(f'hubring/{own}', 1)}", store)


def _start_hub(store: Store, size: int) -> dict[str, object]:
    """Starts a hub that all ranks can reach, and announces it."""
    keys = [f"host/{rank}" for rank in range(1, size)]
    store.wait(keys, timedelta(seconds=START_SECONDS))
    there = {store.get(key).decode() for key in keys}
    flags = ["--no-page"]
    if not there - {host_id()}:  # the members' own memory carries nearly all
        flags += ["--shards", "1"]
    else:
        master = environment().get("MASTER_ADDR", "")
        flags += ["--host", towards("192.0.2.1") if not master or is_loopback(master) else master]
    inherited = {**environment(), PARENT_VARIABLE: str(os.getpid())}
    _world.server = server = LocalServer(size, flags, inherited, timeout=START_SECONDS)
    atexit.register(_end_server)  # runs after the worker's own handler, which leaves the job
    tokens = token_file.read_tokens(token_file.runtime_file(split(server.address)[1]))
    token = "" if is_loopback(split(server.address)[0]) else str(tokens[Role.WORKER])
    store.set("hub", json.dumps({"address": server.address, "token": token}))
    return {"server": server.address}


def _find_hub(store: Store, own: int) -> dict[str, object]:
    """Returns the settings for rank 0's hub, which the store has."""
    store.set(f"host/{own}", host_id())
    store.wait(["hub"], timedelta(seconds=START_SECONDS))
    hub = json.loads(store.get("hub"))
    if not hub["token"]:  # the server's own file has it, which no other user can read
        return {"server": hub["address"]}
    folder = tempfile.mkdtemp(prefix="hubring-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = Path(folder) / "token"
    token_file.write_tokens(file, token_file.parse_tokens([hub["token"]], "the store"))
    return {"server": hub["address"], "token_file": file}


def _end_server() -> None:
    server, _world.server = _world.server, None
    if server is not None:
        atexit.unregister(_end_server)
        server.end(20.0)


def meet(url: str, **more: Any) -> tuple[Store, int, int]:
    """Joins the hub at `hubring://HOST:PORT`, and returns the world's store, this rank and the world size.

    Raises:
        ValueError: The address has no host, no port, or rank and world size are missing.
    """
    parts = urlparse(url)
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    numbers = environment()
    rank, size = (
        int(query.get(name, numbers.get(variable, "-1")))
        for name, variable in (("rank", "RANK"), ("world_size", "WORLD_SIZE"))
    )
    if parts.hostname is None or parts.port is None or rank < 0 or size < 1:
        raise ValueError(
            f"{url}: expected hubring://HOST:PORT, and rank and world_size from init_process_group or from"
            " the variables RANK and WORLD_SIZE"
        )
    timeout = more.get("timeout")
    seconds = timeout.total_seconds() if timeout is not None else 1800.0
    with _world.lock:
        _prepare(None, size, rank, seconds, parts.netloc)
        session = context.init(aggregate=True).session
        assert session is not None, "a worker with a server has a session"
        _world.joined = True
        host = "127.0.0.1" if is_loopback(parts.hostname) else towards(parts.hostname)
        if rank == 0:
            store = TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
            session.board.publish("torch.distributed", f"{host} {store.port}")
        else:
            there, port = session.board.lookup("torch.distributed", seconds).split()
            store = TCPStore(there, int(port), size, is_master=False, wait_for_workers=False)
    return store, rank, size

"""Rows of the bench: the ways to exchange, each as what its processes are told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from shutil import which
from typing import Literal

from ps.errors import UsageError


@dataclass(frozen=True, slots=True)
class Row:
    """One way to exchange.

    Attributes:
        name: What the user calls it.
        about: What it does, in a few words.
        kind: Other people's, ours, or a limit that nobody can beat.
        side: Module and class in this folder of what its members run; empty: it only trains.
        training: The same for whole training steps; empty: it only exchanges.
        launcher: What starts a member.
        server: Flags of `ps-server start`; None: the row has no hub.
        worker: Flags of `ps-worker`.
        members: Processes that step; 0: one a rank.
    """

    name: str
    about: str
    kind: Literal["peer", "ours", "bound"]
    side: str
    training: str = ""
    launcher: Literal["python", "mpirun", "ps-worker"] = "python"
    server: tuple[str, ...] | None = None
    worker: tuple[str, ...] = ()
    members: int = 0

    @property
    def transport(self) -> str:
        """The wire to the hub; empty where there is none."""
        return dict(zip(self.worker[::2], self.worker[1::2], strict=True)).get("--transport", "")

    @property
    def colocated(self) -> bool:
        """Whether the workers are the shards."""
        return "--colocate" in (self.server or ())

    def missing(self) -> str:
        """What this machine lacks for the row, and how to get it; empty where nothing is."""
        if self.launcher == "mpirun" and which("mpirun") is None:
            return "there is no mpirun here (apt install openmpi-bin)"
        if self.launcher == "mpirun" and find_spec("mpi4py") is None:
            return "mpi4py is not installed (pip install 'hubring[bench]')"
        return ""


def _peer(name: str, side: str, about: str, training: str = "") -> Row:
    return Row(name, about, "peer", side, training, "mpirun" if name == "mpi" else "python")


def _ours(name: str, worker: tuple[str, ...], about: str, *server: str) -> Row:
    sides = "hubring:Hubring", "train:HubringTraining"
    return Row(name, about, "ours", *sides, "ps-worker", server, worker)


def _bound(name: str, side: str, members: int, about: str, training: str = "") -> Row:
    return Row(name, about, "bound", side, training, members=members)


ROWS = {
    row.name: row
    for row in (
        _peer("gloo+sgd", "gloo:Gloo", "Gloo allreduce in buckets, then torch's fused optimizer"),
        _peer("ddp-gloo", "ddp:Ddp", "torch's DistributedDataParallel on Gloo", "train:DdpTraining"),
        _peer("mpi", "mpi:Mpi", "Open MPI allreduce in buckets, then torch's fused optimizer"),
        _ours("hub-shm", ("--transport", "shm"), "hub, shared memory"),
        _ours("hub-colo", ("--transport", "auto"), "hub, every worker serves a shard", "--colocate"),
        _ours("hub-zmq", ("--transport", "zmq"), "hub, ZeroMQ over loopback"),
        _ours("hub-grpc", ("--transport", "grpc"), "hub, gRPC over loopback"),
        _ours("ring", ("--topology", "ring"), "our ring, on Gloo"),
        _bound("bound-memory", "bound:Bound", 1, "mean and step where all gradients lie, 1 thread"),
        _bound("bound-memory-2", "bound:BoundOfTwo", 2, "the same, by 2 processes"),
        _bound("bound-copy", "bound:BoundCopy", 1, "as bound-memory, and a copy to each worker"),
        _bound("raw-tcp", "raw:Raw", 0, "plain sockets over loopback doing the hub's work"),
        _bound("train-alone", "", 0, "every rank computes, nothing is exchanged", "train:Alone"),
    )
}


def select(names: Iterable[str]) -> list[Row]:
    """The rows of these names, in this order.

    Raises:
        UsageError: No row has that name, or one is named twice.
    """
    chosen: dict[str, Row] = {}
    for name in names:
        if name not in ROWS:
            raise UsageError(f"--rows: there is no row {name!r}; there are {', '.join(ROWS)}")
        if name in chosen:
            raise UsageError(f"--rows names {name} twice")
        chosen[name] = ROWS[name]
    return list(chosen.values())

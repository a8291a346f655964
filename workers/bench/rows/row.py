"""The rows of the bench, with the settings of their processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from hubring.workers.bench import gpus
from hubring.workers.bench.shapes import Shape
from hubring.workers.compare.experiment.choice import chosen
from hubring.workers.peers.rows import PEERS, PeerRow


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the bench.

    Attributes:
        name: The name on the command line.
        about: One-line description.
        kind: A peer library, Hubring, or a limit that no row can beat.
        side: Module and class in this folder that the members run; empty: the row only trains.
        training: Module and class for whole training steps; empty: the row only exchanges.
        peer: The peer library of the row; None: no requirements and no peer server.
        server: Flags of `ps-server start`; None: the row has no hub.
        worker: Flags of `ps-worker`.
        members: Number of processes that step; 0: one per rank.
        shards: Default number of shards of a hub without colocated shards.
        beside: Module of a server that is neither a hub nor a peer's; `main` gets the job as an argument.
        device: Device of the ranks' tensors.
    """

    name: str
    about: str
    kind: Literal["peer", "ours", "bound"]
    side: str
    training: str = ""
    peer: PeerRow | None = None
    server: tuple[str, ...] | None = None
    worker: tuple[str, ...] = ()
    members: int = 0
    shards: int = 1
    beside: str = ""
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def transport(self) -> str:
        """The transport to the hub; empty without a hub."""
        return self._flag("--transport")

    @property
    def codec(self) -> str:
        """The codec of the gradients; empty: no compression."""
        return self._flag("--compress")

    @property
    def wire(self) -> str:
        """The flags without the codec, which rows of one wire share; empty for other libraries."""
        own = " ".join(self.worker).partition(" --compress")[0]
        return " ".join([own, *(self.server or ())]).strip()

    @property
    def colocated(self) -> bool:
        """Whether the workers run the shards."""
        return "--colocate" in (self.server or ())

    def in_buckets(self, shape: Shape) -> bool:
        """Whether the row uses buckets of `bucket_bytes`.

        A limit and a peer with a server use slices. A hub uses one bucket unless it trains.
        """
        sliced = self.kind == "bound" or (self.peer is not None and self.peer.served)
        return not sliced and (shape.trained or not self.transport)

    def missing(self) -> str:
        """Returns what this machine lacks for the row, and how to install it; empty if nothing is missing."""
        if self.device == "cuda" and (missing := gpus.missing()):
            return missing
        return "" if self.peer is None else self.peer.missing()

    def _flag(self, flag: str) -> str:
        return dict(zip(self.worker[::2], self.worker[1::2], strict=True)).get(flag, "")


def _peer(name: str, side: str, about: str, peer: str = "", training: str = "") -> Row:
    return Row(name, about, "peer", side, training, PEERS[peer] if peer else None)


def _ours(name: str, worker: str, about: str, *server: str, shards: int = 1) -> Row:
    sides = "hubring:Hubring", "train:HubringTraining"
    return Row(name, about, "ours", *sides, None, server, tuple(worker.split()), shards=shards)


def _bound(name: str, side: str, members: int, about: str, training: str = "", beside: str = "") -> Row:
    return Row(name, about, "bound", side, training, members=members, beside=beside)


def _on_gpu(row: Row) -> Row:
    """Returns the row for a GPU. It does not train: a GPU's convolutions round more than the check allows."""
    return replace(row, device="cuda", training="")


_MEMORY_SHARDS = 2
"""Shards of the hub that is limited by cores; over a wire, one server is compared with one server."""
_STANDBY = ("--standby", "1")
_ENCRYPTED = ("--host", "0.0.0.0")  # noqa: S104
"""A server that only this host can reach does not encrypt ZeroMQ's payloads."""
_RAW_SERVER = "hubring.workers.bench.rows.raw_server"

ROWS = {
    row.name: row
    for row in (
        _peer("gloo+sgd", "gloo:Gloo", "Gloo allreduce in buckets, then torch's fused optimizer"),
        _peer("ddp-gloo", "ddp:Ddp", "torch's DistributedDataParallel on Gloo", "ddp", "train:DdpTraining"),
        _peer("mpi", "mpi:Mpi", "Open MPI allreduce in buckets, then torch's fused optimizer", "mpi"),
        _peer("rpc", "rpc:Rpc", "a parameter server on torch.distributed.rpc", "rpc"),
        _ours("hub-shm", "--transport shm", "hub, shared memory", shards=_MEMORY_SHARDS),
        _ours("hub-colo", "--transport shm", "the same, each worker runs a shard", "--colocate"),
        _ours("hub-zmq", "--transport zmq", "hub, ZeroMQ over loopback"),
        _ours("hub-zmq-bf16", "--transport zmq --compress bf16", "the same, 2 bytes per element"),
        _ours("hub-zmq-int8", "--transport zmq --compress int8", "the same, 1 byte per element"),
        _ours("hub-shm-standby", "--transport shm", "hub-shm with standbys", *_STANDBY, shards=2),
        _ours("hub-zmq-standby", "--transport zmq", "hub-zmq with a standby", *_STANDBY),
        _ours("hub-grpc", "--transport grpc", "hub, gRPC over loopback"),
        _ours("hub-zmq-curve", "--transport zmq", "hub-zmq, encrypted as between hosts", *_ENCRYPTED),
        _ours("ring", "--topology ring", "Hubring's ring on Gloo"),
        _ours("ring-bf16", "--topology ring --compress bf16", "the same, 2 bytes per element"),
        _bound("bound-memory", "bound:Bound", 1, "mean and step in one process, 1 thread"),
        _bound("bound-memory-2", "bound:BoundOfTwo", 2, "the same, in 2 processes"),
        _bound("bound-copy", "bound:BoundCopy", 1, "bound-memory with a copy for each worker"),
        _bound("raw-tcp", "raw:Raw", 0, "plain sockets that do a hub's work", beside=_RAW_SERVER),
        _bound("train-alone", "", 0, "each rank computes without an exchange", "train:Alone"),
        _on_gpu(_peer("ddp-nccl", "ddp:Ddp", "DistributedDataParallel on NCCL, on GPUs", "ddp")),
        _on_gpu(_ours("hub-cuda", "--transport shm", "hub and workers on one GPU", "--device", "cuda")),
        _on_gpu(_ours("hub-shm-gpu", "--transport shm", "hub-shm, workers on GPUs", shards=_MEMORY_SHARDS)),
        _on_gpu(_ours("ring-nccl", "--topology ring --backend nccl", "Hubring's ring on NCCL, on GPUs")),
        _on_gpu(_bound("bound-cuda", "bound:BoundCuda", 1, "mean and step of all gradients on one GPU")),
    )
}


def select(names: Iterable[str]) -> list[Row]:
    """Returns the rows with these names, in this order; raises as `chosen`."""
    return chosen(names, ROWS)

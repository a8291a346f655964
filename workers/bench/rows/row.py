"""Rows of the bench: the ways to exchange, each as what its processes are told."""

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
    """One way to exchange.

    Attributes:
        name: What the user calls it.
        about: What it does, in a few words.
        kind: Other people's, ours, or a limit that nobody can beat.
        side: Module and class in this folder of what its members run; empty: it only trains.
        training: The same for whole training steps; empty: it only exchanges.
        peer: What the row stands on; None: nothing that has to be installed, or a server.
        server: Flags of `ps-server start`; None: the row has no hub.
        worker: Flags of `ps-worker`.
        members: Processes that step; 0: one a rank.
        shards: Of a hub that is not colocated, unless told otherwise.
        beside: Module of a server that is neither a hub nor the peer's; its `main` is told the job.
        device: Where the ranks' tensors are.
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
        """The wire to the hub; empty where there is none."""
        return self._told("--transport")

    @property
    def codec(self) -> str:
        """What gradients are compressed with; empty: nothing."""
        return self._told("--compress")

    @property
    def wire(self) -> str:
        """What rows that differ by their codec alone have in common; empty if it is not ours."""
        return " ".join(self.worker).partition(" --compress")[0]

    @property
    def colocated(self) -> bool:
        """Whether the workers are the shards."""
        return "--colocate" in (self.server or ())

    def in_buckets(self, shape: Shape) -> bool:
        """Whether it hands over buckets of the size told.

        A limit and a peer with a server cut slices; a hub hands over all at once unless it trains.
        """
        sliced = self.kind == "bound" or (self.peer is not None and self.peer.served)
        return not sliced and (shape.trained or not self.transport)

    def missing(self) -> str:
        """What this machine lacks for the row, and how to get it; empty where nothing is."""
        if self.device == "cuda" and (missing := gpus.missing()):
            return missing
        return "" if self.peer is None else self.peer.missing()

    def _told(self, flag: str) -> str:
        return dict(zip(self.worker[::2], self.worker[1::2], strict=True)).get(flag, "")


def _peer(name: str, side: str, about: str, peer: str = "", training: str = "") -> Row:
    return Row(name, about, "peer", side, training, PEERS[peer] if peer else None)


def _ours(name: str, worker: str, about: str, *server: str, shards: int = 1) -> Row:
    sides = "hubring:Hubring", "train:HubringTraining"
    return Row(name, about, "ours", *sides, None, server, tuple(worker.split()), shards=shards)


def _bound(name: str, side: str, members: int, about: str, training: str = "", beside: str = "") -> Row:
    return Row(name, about, "bound", side, training, members=members, beside=beside)


def _on_gpu(row: Row) -> Row:
    """The row on a GPU. It does not train: a GPU's convolutions round more than the check allows."""
    return replace(row, device="cuda", training="")


_MEMORY_SHARDS = 2
"""Of the hub whose limit are cores; over a wire one server is compared with one server."""
_RAW_SERVER = "hubring.workers.bench.rows.raw_server"

ROWS = {
    row.name: row
    for row in (
        _peer("gloo+sgd", "gloo:Gloo", "Gloo allreduce in buckets, then torch's fused optimizer"),
        _peer("ddp-gloo", "ddp:Ddp", "torch's DistributedDataParallel on Gloo", "ddp", "train:DdpTraining"),
        _peer("mpi", "mpi:Mpi", "Open MPI allreduce in buckets, then torch's fused optimizer", "mpi"),
        _peer("rpc", "rpc:Rpc", "a parameter server on torch.distributed.rpc", "rpc"),
        _ours("hub-shm", "--transport shm", "hub, shared memory", shards=_MEMORY_SHARDS),
        _ours("hub-colo", "--transport shm", "the same, every worker serves a shard", "--colocate"),
        _ours("hub-zmq", "--transport zmq", "hub, ZeroMQ over loopback"),
        _ours("hub-zmq-bf16", "--transport zmq --compress bf16", "the same, 2 bytes an element"),
        _ours("hub-zmq-int8", "--transport zmq --compress int8", "the same, 1 byte an element"),
        _ours("hub-grpc", "--transport grpc", "hub, gRPC over loopback"),
        _ours("ring", "--topology ring", "our ring, on Gloo"),
        _ours("ring-bf16", "--topology ring --compress bf16", "the same, 2 bytes an element"),
        _bound("bound-memory", "bound:Bound", 1, "mean and step where all gradients lie, 1 thread"),
        _bound("bound-memory-2", "bound:BoundOfTwo", 2, "the same, by 2 processes"),
        _bound("bound-copy", "bound:BoundCopy", 1, "as bound-memory, and a copy to each worker"),
        _bound("raw-tcp", "raw:Raw", 0, "plain sockets doing one hub's work", beside=_RAW_SERVER),
        _bound("train-alone", "", 0, "every rank computes, nothing is exchanged", "train:Alone"),
        _on_gpu(_peer("ddp-nccl", "ddp:Ddp", "DistributedDataParallel on NCCL, on GPUs", "ddp")),
        _on_gpu(_ours("hub-cuda", "--transport shm", "hub and workers on one GPU", "--device", "cuda")),
        _on_gpu(_ours("ring-nccl", "--topology ring --backend nccl", "our ring, on NCCL, on GPUs")),
        _on_gpu(_bound("bound-cuda", "bound:BoundCuda", 1, "mean and step of all gradients on one GPU")),
    )
}


def select(names: Iterable[str]) -> list[Row]:
    """The rows of these names, in this order; raises as `chosen`."""
    return chosen(names, ROWS)

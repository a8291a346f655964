"""The rows of the bench, with the settings of their processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from hubring.ps.config.declaration import flag_words
from hubring.workers.bench.job import ModelShape
from hubring.workers.peers import machine
from hubring.workers.peers.rows import PEERS, PeerRow


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One row of the bench.

    Attributes:
        name: The name on the command line.
        about: One-line description.
        kind: A peer library, Hubring, or a limit that no row can beat.
        side: Module and class in this folder that the members run; empty: the row only trains.
        training: Module and class for whole training steps; empty: the row only exchanges.
        peer: The peer library of the row; None: no requirements and no peer server.
        server: Flags of `ps-server start` besides those of the fields below; None: the row is not Hubring's.
        transport: Transport to the hub; empty: there is no hub.
        codec: Codec of the gradients; empty: no compression.
        backend: Backend of the ring; empty: the default.
        colocated: Whether the workers run the shards.
        members: Number of processes that step; 0: one per rank.
        shards: Default number of shards of a hub without colocated shards.
        beside: Module of a server that is neither a hub nor a peer's, and arguments of its `main` after the
            job.
        device: Device of the ranks' tensors.
    """

    name: str
    about: str
    kind: Literal["peer", "ours", "bound"]
    side: str
    training: str = ""
    peer: PeerRow | None = None
    server: tuple[str, ...] | None = None
    transport: str = ""
    codec: str = ""
    backend: str = ""
    colocated: bool = False
    members: int = 0
    shards: int = 1
    beside: tuple[str, ...] = ()
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def worker(self) -> list[str]:
        """Flags of `ps-worker`."""
        ring = self.server is not None and not self.transport
        values = {"topology": "ring" if ring else "", "transport": self.transport}
        values |= {"compress": self.codec, "backend": self.backend}
        return flag_words({name: value for name, value in values.items() if value})

    @property
    def wire(self) -> BenchRow:
        """What rows of one wire share: all but name, description and codec."""
        return replace(self, name="", about="", codec="")

    def in_buckets(self, shape: ModelShape) -> bool:
        """Whether the row uses buckets of `bucket_bytes`.

        A limit and a peer with a server use slices. A hub uses one bucket unless it trains.
        """
        sliced = self.kind == "bound" or (self.peer is not None and self.peer.served)
        return not sliced and (shape.trained or not self.transport)

    def missing(self) -> str:
        """Returns what this machine lacks for the row, and how to install it; empty if nothing is missing."""
        if self.device == "cuda" and (missing := machine.why_no_gpu()):
            return missing
        return "" if self.peer is None else self.peer.missing()


def _peer(name: str, side: str, about: str, peer: str = "", training: str = "") -> BenchRow:
    return BenchRow(name, about, "peer", side, training, PEERS[peer] if peer else None)


def _ring(name: str, about: str, *server: str, **more: Any) -> BenchRow:
    sides = "libraries:HubringMember", "train:HubringTraining"
    return BenchRow(name, about, "ours", *sides, server=server, **more)


def _hub(name: str, transport: str, about: str, *server: str, **more: Any) -> BenchRow:
    return _ring(name, about, *server, transport=transport, **more)


def _also_bfloat16(row: BenchRow) -> tuple[BenchRow, BenchRow]:
    """Returns the row, and the same for a bfloat16 model."""
    name, about = f"{row.name}-bfloat16", f"{row.name}, a bfloat16 model"
    return row, replace(row, name=name, about=about, side="libraries:Bfloat16Member", training="")


def _bound(name: str, side: str, members: int, about: str, *beside: str, training: str = "") -> BenchRow:
    return BenchRow(name, about, "bound", side, training, members=members, beside=beside)


def _on_gpu(row: BenchRow) -> BenchRow:
    """Returns the row for a GPU. It does not train: a GPU's convolutions round more than the check allows."""
    return replace(row, device="cuda", training="")


_MEMORY_SHARDS = 2
"""Shards of the hub that is limited by cores; over a wire, one server is compared with one server."""
_STANDBY = ("--standby", "1")
_ENCRYPTED = ("--host", "0.0.0.0")  # noqa: S104
"""A server that only this host can reach does not encrypt ZeroMQ's payloads."""
_DDP, _DDP_HUB = "libraries:DdpMember", ("libraries:DdpHubMember", "train:DdpHubTraining")
_RAW_SERVER = "hubring.workers.bench.raw"

ROWS = {
    row.name: row
    for row in (
        _peer("gloo+sgd", "libraries:GlooMember", "Gloo allreduce in buckets, then torch's fused optimizer"),
        _peer("ddp-gloo", _DDP, "torch's DistributedDataParallel on Gloo", "ddp", "train:DdpTraining"),
        BenchRow("ddp-hub", "the same on the backend hubring", "ours", *_DDP_HUB, PEERS["ddp"]),
        _peer("mpi", "libraries:MpiMember", "Open MPI in buckets, then torch's fused optimizer", "mpi"),
        _peer("rpc", "libraries:RpcMember", "a parameter server on torch.distributed.rpc", "rpc"),
        *_also_bfloat16(_hub("hub-shm", "shm", "hub, shared memory", shards=_MEMORY_SHARDS)),
        _hub("hub-colo", "shm", "hub-shm, each worker runs a shard", colocated=True),
        *_also_bfloat16(_hub("hub-zmq", "zmq", "hub, ZeroMQ over unix sockets")),
        _hub("hub-zmq-tcp", "zmq-tcp", "hub, ZeroMQ over loopback"),
        _hub("hub-zmq-aes", "zmq-tcp", "the same, encrypted as between hosts", *_ENCRYPTED),
        _hub("hub-zmq-bf16", "zmq", "hub-zmq, 2 bytes per element", codec="bf16"),
        _hub("hub-zmq-int8", "zmq", "hub-zmq, 1 byte per element", codec="int8"),
        _hub("hub-shm-standby", "shm", "hub-shm with standbys", *_STANDBY, shards=2),
        _hub("hub-zmq-standby", "zmq", "hub-zmq with a standby", *_STANDBY),
        *_also_bfloat16(_hub("hub-grpc", "grpc", "hub, gRPC over unix sockets")),
        _hub("hub-grpc-tcp", "grpc-tcp", "hub, gRPC over loopback"),
        _ring("ring", "Hubring's ring, shared memory"),
        _ring("ring-bf16", "the same, 2 bytes per element", codec="bf16"),
        _ring("ring-gloo", "Hubring's ring on Gloo", backend="gloo"),
        _ring("ring-gloo-bf16", "the same, 2 bytes per element", codec="bf16", backend="gloo"),
        _bound("bound-memory", "raw:Bound", 1, "mean and step in one process, 1 thread"),
        _bound("bound-memory-2", "raw:BoundOfTwo", 2, "the same, in 2 processes"),
        _bound("bound-copy", "raw:BoundCopy", 1, "bound-memory with a copy for each worker"),
        _bound("raw-tcp", "raw:Raw", 0, "plain sockets that do a hub's work", _RAW_SERVER),
        _bound("raw-tcp-aes", "raw:RawAes", 0, "the same, encrypted like hub-zmq-aes", _RAW_SERVER, "aes"),
        _bound("train-alone", "", 0, "each rank computes, no exchange", training="train:AloneTraining"),
        _on_gpu(_peer("ddp-nccl", _DDP, "DistributedDataParallel on NCCL, on GPUs", "ddp")),
        _on_gpu(_hub("hub-cuda", "shm", "hub and workers on one GPU", "--device", "cuda")),
        _on_gpu(_hub("hub-shm-gpu", "shm", "hub-shm, workers on GPUs", shards=_MEMORY_SHARDS)),
        _on_gpu(_ring("ring-nccl", "Hubring's ring on NCCL, on GPUs", backend="nccl")),
        _on_gpu(_bound("bound-cuda", "raw:BoundCuda", 1, "mean and step of all gradients on one GPU")),
    )
}
NAME_WIDTH = max(map(len, ROWS))

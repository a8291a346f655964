"""Peer `rpc`: a parameter server on torch.distributed.rpc, as PyTorch's tutorial writes one, tuned.

A worker sends every slice of its gradients as a call of its own; the call is
answered with the stepped values once all ranks' gradients are there, so that
slices overlap. They lie on the servers in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from hubring.ps.core.errors import HubringError, RingBroken
from hubring.ps.core.types import Hyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucketing import Bucket
from hubring.workers.communicators.base import Start
from hubring.workers.compare.peers import rpc_server
from hubring.workers.compare.peers.after_backward import AfterBackward
from hubring.workers.compare.peers.interface import talk_through
from hubring.workers.compare.peers.peer import Answer, Peer, Seat, init_method

SLICE_BYTES = 4 << 20
"""Of 4, 10 and 25 MiB the fastest, as `hubring.workers.bench.rpc` was measured."""

_THREADS = 4


class Slice(NamedTuple):
    """A flat piece of a bucket, and who holds it; the tensors are views of the bucket's memory."""

    server: str
    number: int
    gradients: Tensor
    values: Tensor


class Rpc(Peer):
    """A worker; what it steps with is on the servers."""

    topology = "rpc"
    bytes_are = "counted"
    optimizer = AfterBackward

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self.steps_on = "worker" if seat.aggregate else "server"
        self._slices: dict[int, list[Slice]] = {}
        join(f"worker-{seat.rank}", seat.servers + seat.rank, seat)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = _ask(server_of(0), rpc_server.gather, self.size, self.rank, value)
        return values

    def attach(self, buckets: list[Bucket]) -> Start:
        start = super().attach(buckets)
        for bucket in buckets:
            self._slices[bucket.spec.index] = self._cut(bucket)
        if self.rank == 0:
            for bucket in buckets:
                for one in self._slices[bucket.spec.index]:
                    told = one.number, one.values, bucket.spec.optimizer, self.size
                    _ask(one.server, rpc_server.hold, *told)
        self.gather(None)  # the servers hold everything from here on
        return start

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        slices = self._slices[bucket.spec.index]
        calls = [
            rpc.rpc_async(one.server, rpc_server.push_pull, (one.number, one.gradients, dict(hyper)))
            for one in slices
        ]
        self.traffic.bytes_sent += bucket.gradients.nbytes

        def fetch() -> None:
            for one, call in zip(slices, calls, strict=True):
                answer = call.wait()
                self.traffic.bytes_received += answer.nbytes
                (one.values if self.steps_on == "server" else one.gradients).copy_(answer)

        return Answer(f"the exchange of bucket {bucket.spec.index}", fetch)

    def close(self, *, finished: bool) -> None:
        if finished:  # else it would wait for what may never come
            rpc.shutdown()

    def _cut(self, bucket: Bucket) -> list[Slice]:
        numel = SLICE_BYTES // bucket.gradients.element_size()
        pairs = zip(torch.split(bucket.gradients, numel), torch.split(bucket.values, numel), strict=True)
        first = sum(map(len, self._slices.values()))
        return [
            Slice(server_of(number % self.seat.servers), number, _alone(gradients), values)
            for number, (gradients, values) in enumerate(pairs, start=first)
        ]


def _alone(flat: Tensor) -> Tensor:
    """The same memory as a storage of its own: of a part of a larger one, RPC would send a copy."""
    return torch.from_numpy(flat.numpy())


def _ask(server: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return rpc.rpc_sync(server, function, arguments)
    except RuntimeError as cause:
        raise HubringError(f"{server} did not answer {function.__name__}: {cause}") from cause


def server_of(number: int) -> str:
    """What a server is called among the members of the RPC group, where it comes before the workers."""
    return f"server-{number}"


def join(name: str, place: int, seat: Seat) -> None:
    """Makes this process a member of the RPC group.

    Args:
        name: Under which others call it.
        place: Among servers and workers, servers first.
        seat: Names the meeting place and how many members there are.

    Raises:
        RingBroken: They did not find each other.
    """
    channels = ["cma", "basic"]
    if seat.host is not None:
        talk_through(seat.host)
        channels = ["basic"]  # cma reads the sender's memory, past the link of a host that is a namespace
    # torch's first choice, its transport over shared memory, spins while it waits, where workers compute.
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=_THREADS,
        rpc_timeout=seat.timeout,
        init_method=init_method(seat.meet),
        _transports=["uv"],
        _channels=channels,
    )
    members = seat.servers + seat.size
    told = {"rank": place, "world_size": members, "rpc_backend_options": options}
    try:
        rpc.init_rpc(name, **told)  # type: ignore[no-untyped-call]
    except RuntimeError as cause:
        raise RingBroken(f"{name} did not find the others at {seat.meet}: {cause}") from cause

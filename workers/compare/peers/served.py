"""Peers `rpc` and `ray`: a parameter server averages gradients and steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hubring.ps.core.errors import HubringError
from hubring.ps.core.types import Hyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.communicators.base import ParameterState, Start
from hubring.workers.compare.peers.after_backward import AfterBackward
from hubring.workers.compare.peers.peer import Peer
from hubring.workers.peers import ray, rpc
from hubring.workers.peers.seat import Seat

log = logging.getLogger(__name__)

Slice = tuple[int, Tensor, Tensor]
"""Number, gradients, and the buffer for the answer; both tensors are in the bucket's memory."""


class Served(Peer):
    """A worker of a parameter server.

    Attributes:
        client: Connects it to the servers.
        slice_bytes: Size of a slice; None: a whole bucket.
    """

    bytes_are = "counted"
    optimizer = AfterBackward
    client: ClassVar[type[rpc.Client | ray.Client]]
    slice_bytes: ClassVar[int | None] = None

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self.steps_on = "worker" if seat.aggregate else "server"
        self._slices: dict[int, list[Slice]] = {}
        self._client = self.client(seat)

    def gather(self, value: Any) -> list[Any]:
        return self._client.gather(value)

    def attach(self, buckets: list[Bucket], state: Mapping[str, ParameterState] | None = None) -> Start:
        start = super().attach(buckets)
        self.write_state(buckets, state or {})
        for bucket in buckets:
            self._slices[bucket.spec.index] = self._cut(bucket)
        self.gather(None)  # waits until the servers hold all parameters
        return start

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        if self.steps_on == "worker":  # the server does not tell who has a gradient: absent ones are zeros
            bucket.absent = frozenset()
        answers = [self._client.push_pull(*one, hyper) for one in self._slices[bucket.spec.index]]
        self.traffic.bytes_sent += bucket.gradients.nbytes

        def fetch() -> None:
            for answer in answers:
                answer()
            self.traffic.bytes_received += bucket.gradients.nbytes

        return Answer(f"the exchange of bucket {bucket.spec.index}", fetch)

    def read_state(self, buckets: Sequence[Bucket]) -> dict[str, dict[str, Tensor]]:
        return {}  # these servers cannot be asked for it

    def write_state(self, buckets: Sequence[Bucket], states: Mapping[str, ParameterState]) -> None:
        if states:
            log.warning("%s: the servers' optimizer keeps its own state, not the loaded one", self.topology)

    def gradients_moved(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            held = self._slices[bucket.spec.index]
            parts = torch.split(bucket.gradients, self._numel(bucket))
            self._slices[bucket.spec.index] = [
                (number, rpc.own(part), part if self.steps_on == "worker" else target)
                for (number, _, target), part in zip(held, parts, strict=True)
            ]

    def close(self, *, finished: bool) -> None:
        if finished:  # else it could wait forever
            self._client.leave()

    def _numel(self, bucket: Bucket) -> int:
        return (self.slice_bytes or bucket.gradients.nbytes) // bucket.gradients.element_size()

    def _cut(self, bucket: Bucket) -> list[Slice]:
        numel = self._numel(bucket)
        pairs = zip(torch.split(bucket.gradients, numel), torch.split(bucket.values, numel), strict=True)
        slices: list[Slice] = []
        for number, (gradients, values) in enumerate(pairs, start=sum(map(len, self._slices.values()))):
            if self.rank == 0:
                self._client.hold(number, values, bucket.spec.optimizer)
            target = values if self.steps_on == "server" else gradients
            slices.append((number, rpc.own(gradients), target))
        return slices


class Rpc(Served):
    """A worker of the parameter server on torch.distributed.rpc."""

    topology = "rpc"
    client = rpc.Client
    slice_bytes = rpc.SLICE_BYTES


class Ray(Served):
    """A worker of Ray's actor."""

    topology = "ray"
    client = ray.Client


class Answer(Work):
    """An exchange whose answer is fetched by the caller of `wait`.

    Args:
        what: Name of the exchange.
        fetch: Waits for the answer and stores it.
    """

    def __init__(self, what: str, fetch: Callable[[], None]) -> None:
        super().__init__(what)
        self._fetch = fetch

    def wait(self, timeout: float | None = None) -> None:
        """Fetches the answer, with the peer's own timeout."""
        if not self.done:
            try:
                self._fetch()
            except Exception as error:  # peers' libraries raise many types
                self.fail(HubringError(f"{self.what} failed: {error}"))
            else:
                self.complete_part()
        super().wait(timeout)

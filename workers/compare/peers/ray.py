"""Peer `ray`: Ray's parameter-server pattern, an actor that averages every rank's gradients and steps.

A worker is a driver of a cluster of Ray's on this machine, which is this run's
own: it listens on loopback and wants a token that lies in the run's folder. Arrays
go through Ray's object store, which is shared memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hubring.ps.config.environment import export
from hubring.ps.core.errors import HubringError, ServerUnreachable
from hubring.ps.core.types import Hyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucketing import Bucket
from hubring.workers.communicators.base import Start
from hubring.workers.compare.peers.after_backward import AfterBackward
from hubring.workers.compare.peers.peer import Answer, Peer, Seat

NAMESPACE = "hubring"
ACTOR = "server"


class Ray(Peer):
    """A worker; what it steps with is the actor's."""

    topology = "ray"
    bytes_are = "counted"
    optimizer = AfterBackward

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self.steps_on = "worker" if seat.aggregate else "server"
        use_token(Path(seat.meet))
        import ray

        self._ray = ray
        try:
            address = Path(seat.meet).read_text()
            ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
            self._server = ray.get_actor(ACTOR)
        except (OSError, RuntimeError, ValueError) as cause:
            raise ServerUnreachable(f"no parameter server of Ray's at {seat.meet}: {cause}") from cause

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = self._ask("gather", self.rank, value)
        return values

    def attach(self, buckets: list[Bucket]) -> Start:
        start = super().attach(buckets)
        if self.rank == 0:
            values = [bucket.values.numpy() for bucket in buckets]
            self._ask("hold", values, [bucket.spec.optimizer for bucket in buckets])
        self.gather(None)  # the actor holds everything from here on
        return start

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        index = bucket.spec.index
        answer = self._server.push_pull.remote(index, bucket.gradients.numpy(), dict(hyper))
        self.traffic.bytes_sent += bucket.gradients.nbytes
        target = bucket.values if self.steps_on == "server" else bucket.gradients

        def fetch() -> None:
            came = self._ray.get(answer, timeout=self.timeout)
            self.traffic.bytes_received += came.nbytes
            np.copyto(target.numpy(), came)

        return Answer(f"the exchange of bucket {index}", fetch)

    def close(self, *, finished: bool) -> None:
        if finished:
            self._ask("leave")
            self._ray.shutdown()

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return self._ray.get(getattr(self._server, method).remote(*arguments), timeout=self.timeout)
        except self._ray.exceptions.RayError as cause:
            raise HubringError(f"Ray's parameter server did not answer {method}: {cause}") from cause


def use_token(meet: Path) -> Path:
    """Lets Ray, which is not yet imported, use this run's token; returns the file, beside `meet`."""
    token = meet.with_suffix(".token")
    export({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)})
    return token

"""Where a job's shards are. A shard that is lost moves to its standby."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import grpc

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ControlStub
from hubring.ps.security.certificate import Identity
from hubring.ps.transport.registry import ShardAddress

log = logging.getLogger(__name__)

ASK_SECONDS = 2.0
"""How long the coordinator may take to answer. The caller asks again."""


class ShardLocations:
    """The addresses of the shards. Safe from any thread.

    Args:
        stub: The coordinator's stub.
        identity: The worker's rank and incarnation, as on the wire.
        shards: The addresses at the start of the job.
        own: The certificate that the worker shows to shards; None for none.

    Attributes:
        shards: The last known addresses, in the order of the shards' numbers.
    """

    def __init__(
        self,
        stub: ControlStub,
        identity: tuple[int, bytes],
        shards: Iterable[pb.ShardAddress],
        own: Identity | None = None,
    ) -> None:
        self._own = own
        self.shards = list(map(self._address, shards))
        self._stub = stub
        self._identity = identity
        self._failovers = 0
        self._on_move: Callable[[int], None] | None = None

    def on_move(self, callback: Callable[[int], None]) -> None:
        """Calls `callback` with the number of each shard that has moved, in the heartbeat's thread."""
        self._on_move = callback

    def locate(self, number: int) -> ShardAddress:
        """Asks where a shard is; returns the last known address if the coordinator does not answer."""
        self._refresh()
        return self.shards[number]

    def note(self, failovers: int) -> None:
        """Notes how often a standby has replaced a shard, from the reply to a heartbeat."""
        if failovers == self._failovers:
            return
        before = list(self.shards)
        if self._refresh():
            self._failovers = failovers
        if self._on_move is not None:
            for number, (old, new) in enumerate(zip(before, self.shards, strict=True)):
                if new != old:
                    self._on_move(number)

    def _refresh(self) -> bool:
        """Returns whether the coordinator answered."""
        rank, incarnation = self._identity
        try:
            reply = self._stub.Shards(
                pb.ShardsRequest(rank=rank, incarnation=incarnation), timeout=ASK_SECONDS
            )
        except grpc.RpcError as error:
            log.debug("the coordinator does not tell where the shards are: %s", error.code().name)
            return False
        if reply is not None and len(reply.shards) == len(self.shards):
            self.shards[:] = map(self._address, reply.shards)
            return True
        return False

    def _address(self, shard: pb.ShardAddress) -> ShardAddress:
        return ShardAddress.from_proto(shard, self._own)

"""Live connections between one worker and one shard, framing included: a bit of the stream flips."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch

from hubring.ps.client import shard_silence
from hubring.ps.core.errors import HubringError
from hubring.ps.store.consistency import BSP
from hubring.ps.transport.base import Connection, Transport
from hubring.ps.transport.grpc.transport import GrpcTransport
from hubring.ps.transport.zmq.transport import ZmqTransport
from tests.campaign.flips.place import Outcome
from tests.campaign.tampering import flipped
from tests.support.transports.one_shard import OneShard, begin, push
from tests.support.transports.relay import Relay

NUMEL = 64
STEPS = 3
PATIENCE = 60.0
"""Seconds for a step."""
SILENCE_SECONDS = 0.5
"""In place of 5 s, so that a flip that stops a connection does not take so long."""


class _Flip:
    """Passes bytes on, and flips one bit of all that pass.

    Args:
        bit: Its number; None: flips none.
    """

    def __init__(self, bit: int | None) -> None:
        self._bit = bit
        self.passed = 0

    def __call__(self, data: bytes) -> bytes:
        first, self.passed = 8 * self.passed, self.passed + len(data)
        if self._bit is not None and first <= self._bit < 8 * self.passed:
            return flipped(data, self._bit - first)
        return data


class Stream:
    """The bytes of one direction of a transport.

    Args:
        name: The transport's name.
        make_transport: Returns one.
        to_shard: The direction.
    """

    share = 1

    def __init__(self, name: str, make_transport: Callable[[], Transport], *, to_shard: bool) -> None:
        self.name = f"{name}, live, to the {'shard' if to_shard else 'worker'}"
        self._make_transport, self._to_shard = make_transport, to_shard
        untouched = _Flip(None)
        self._expected, _ = self._train(untouched)
        self.bits = 8 * untouched.passed

    def flip(self, bit: int) -> Outcome | None:
        flip = _Flip(bit)
        try:
            values, noticed = self._train(flip)
        except HubringError:
            return Outcome.DETECTED
        if 8 * flip.passed <= bit:
            return None
        if not torch.equal(values, self._expected):
            return Outcome.SILENT
        return Outcome.DETECTED if noticed else Outcome.HARMLESS

    def _train(self, flip: _Flip) -> tuple[torch.Tensor, bool]:
        """Returns the parameters after some steps, and whether something was sent again."""
        shard = OneShard(BSP(), 1, self._make_transport(), NUMEL)
        sides = (flip, bytes) if self._to_shard else (bytes, flip)
        relay = shard.behind(lambda port: Relay(port, *sides))
        dialled: list[Connection] = []

        def count(connection: Connection) -> Connection:
            dialled.append(connection)
            return connection

        with patch.object(shard_silence, "SECONDS", SILENCE_SECONDS):
            client = shard.client(0, count)
            try:
                values = begin(client, NUMEL)
                for step in range(STEPS):
                    push(client, torch.linspace(0, step + 1, NUMEL), values).wait(PATIENCE)
                stats, damaged = shard.ask(lambda loop: (loop.store.stats(), loop.service.damaged))
            finally:
                client.close()
                relay.close()
                shard.stop()
        if stats.pushes != STEPS:
            return torch.full((NUMEL,), torch.nan), True
        return values, bool(len(dialled) > 1 or damaged or stats.duplicates)


def streams() -> list[Stream]:
    """Returns the places of all live connections."""
    kinds: list[tuple[str, Callable[[], Transport]]] = [
        ("zmq", ZmqTransport),
        ("grpc", lambda: GrpcTransport(lanes=1)),
    ]
    return [Stream(name, make, to_shard=way) for name, make in kinds for way in (True, False)]

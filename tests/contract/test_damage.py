"""A bit that turns on the way between worker and shard changes nothing but a counter."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import closing

import pytest
import torch

from hubring.protos import data_pb2 as pb
from hubring.ps.client import connections
from hubring.ps.core.errors import ConnectionLost
from hubring.ps.store.consistency import BSP
from hubring.ps.transport.base import Transport
from hubring.ps.transport.grpc.transport import GrpcTransport
from hubring.ps.transport.zmq.transport import ZmqTransport
from tests.support.transports.one_shard import SOON, OneShard, begin, push
from tests.support.transports.relay import BitFlip, Relay

pytestmark = pytest.mark.slow

NUMEL = (1 << 20) // 4 + 1000  # two frames of gRPC
GRADIENT = 3.7
PAYLOAD = struct.pack("<f", GRADIENT) * 8
HEADER = pb.Header(payload_bytes=4 * NUMEL, dtype=pb.FLOAT32).SerializeToString()
"""The first message with such a payload is one of `begin`."""

TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "zmq": ZmqTransport,
    "zmq apart": lambda: ZmqTransport(apart=True),
    "grpc": lambda: GrpcTransport(lanes=1),
    "grpc on two lanes": lambda: GrpcTransport(lanes=2),
}


def train(
    make_transport: Callable[[], Transport], relay: Callable[[int], Relay]
) -> tuple[torch.Tensor, int, int]:
    """Takes three steps; returns the parameters, and what the shard counted as pushes and as damaged.

    It cannot know whose a damaged header was.
    """
    with closing(OneShard(BSP(), 1, make_transport(), NUMEL)) as shard:
        shard.behind(relay)
        client = shard.client(0)
        values = begin(client, NUMEL)
        for _ in range(3):
            gradient = torch.full((NUMEL,), GRADIENT)
            push(client, gradient, values).wait(SOON)
            assert gradient.eq(GRADIENT).all()
        return (
            values,
            shard.ask(lambda loop: loop.store.stats().pushes),
            shard.ask(lambda loop: loop.service.damaged + loop.rejections.counts().get("damage", 0)),
        )


def reference() -> torch.Tensor:
    """The parameters after three steps of one process."""
    weight = torch.nn.Parameter(torch.zeros(NUMEL))
    optimizer = torch.optim.SGD([weight], lr=1.0, maximize=True)
    for _ in range(3):
        weight.grad = torch.full((NUMEL,), GRADIENT)
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("marker", [PAYLOAD, HEADER], ids=["payload", "header"])
@pytest.mark.parametrize("toward", ["shard", "worker"])
def test_a_turned_bit_costs_a_second_try_and_is_counted(name: str, marker: bytes, toward: str) -> None:
    flip = BitFlip(marker)
    sides = (flip, bytes) if toward == "shard" else (bytes, flip)
    values, pushes, damaged = train(TRANSPORTS[name], lambda port: Relay(port, *sides))
    assert flip.fired == 1
    assert torch.equal(values, reference())
    assert (pushes, damaged) == (3, toward == "shard")


@pytest.mark.parametrize("name", ["zmq", "grpc"])
def test_a_message_damaged_on_every_try_fails_with_a_hint(name: str) -> None:
    flip = BitFlip(PAYLOAD, times=1 << 30)
    with pytest.raises(ConnectionLost, match=rf"damaged {connections.MAX_DAMAGED} times.*offloads"):
        train(TRANSPORTS[name], lambda port: Relay(port, flip))
    assert flip.fired >= connections.MAX_DAMAGED

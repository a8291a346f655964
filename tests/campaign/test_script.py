"""The script of the victim connects to relays in place of the shards."""

from __future__ import annotations

import pytest

from hubring.ps.security.door import OPEN
from hubring.ps.transport import registry
from hubring.ps.transport.registry import ShardAddress
from tests.campaign.script import connect_through


def test_shards_are_reached_through_their_relays(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled: list[dict[str, str]] = []
    monkeypatch.setattr(registry, "dial_by", lambda kind, shard, timeout: dialled.append(shard.addresses))
    connect_through({"40001": "50001", "40002": "50002"})
    addresses = {"shm": "hubring-7", "zmq": "tcp://127.0.0.1:40001", "grpc": "127.0.0.1:40003"}
    registry.dial_by(None, ShardAddress("host", addresses, OPEN), 1.0)  # type: ignore[arg-type]
    assert dialled == [{**addresses, "zmq": "tcp://127.0.0.1:50001"}]

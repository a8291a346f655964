from __future__ import annotations

import pytest

from hubring.ps.core.bounds import Rejections
from hubring.ps.transport.grpc import listener as grpc_listener
from hubring.ps.transport.grpc.listener import SILENT_SECONDS, OpenStream, OpenStreams


class Listener:
    """Opens streams, and records which were ended."""

    def __init__(self) -> None:
        self.rejections = Rejections()
        self.streams = OpenStreams(self.rejections)
        self.ended: list[str] = []

    def open(self, peer: str, now: float = 0.0) -> OpenStream | None:
        stream = OpenStream(peer, now)
        stream.end = lambda: self.ended.append(peer)  # type: ignore[method-assign]
        return stream if self.streams.take(stream) else None


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Listener:
    monkeypatch.setattr(grpc_listener, "MAX_STREAMS", 3)
    monkeypatch.setattr(grpc_listener, "ADDRESS_STREAMS", 2)
    return Listener()


def test_an_address_has_a_bounded_number_of_streams(listener: Listener) -> None:
    assert listener.open("ipv4:10.0.0.1:1")
    last = listener.open("ipv4:10.0.0.1:2")
    assert last is not None
    assert not listener.open("ipv4:10.0.0.1:3")
    assert listener.open("ipv4:10.0.0.2:1")
    assert listener.rejections.counts() == {"streams": 1}
    listener.streams.leave(last)
    assert listener.open("ipv4:10.0.0.1:4")


def test_all_addresses_together_have_a_bounded_number_of_streams(listener: Listener) -> None:
    for address in ("10.0.0.1", "10.0.0.2", "10.0.0.3"):
        assert listener.open(f"ipv4:{address}:1")
    assert not listener.open("ipv6:%5B::1%5D:1")


def test_a_stream_that_sent_nothing_makes_room_after_a_while(listener: Listener) -> None:
    busy = listener.open("ipv4:10.0.0.1:1")
    assert busy is not None
    busy.silent = False
    listener.open("ipv4:10.0.0.1:2", 1.0)
    assert not listener.open("ipv4:10.0.0.1:3", SILENT_SECONDS)
    assert listener.ended == []
    assert listener.open("ipv4:10.0.0.1:4", SILENT_SECONDS + 1.1)
    assert listener.ended == ["ipv4:10.0.0.1:2"]
    assert listener.rejections.counts() == {"streams": 1, "silent stream": 1}

"""What the control port gives to a connection, and how many it accepts."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import grpc
import pytest

from hubring.ps.config.server import ServerConfig
from hubring.ps.core import bounds
from hubring.ps.transport.grpc import channel
from hubring.ps.transport.grpc.channel import CONTROL_CALLS, SPARE_CONNECTIONS

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)
MAX_CONCURRENT_STREAMS = 3


async def test_a_connection_has_few_calls() -> None:
    server = grpc.aio.server(options=channel.control_options(ServerConfig().members))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE)
    settings = await first_settings(reader)
    writer.close()
    await server.stop(None)
    assert settings[MAX_CONCURRENT_STREAMS] == CONTROL_CALLS


async def first_settings(reader: asyncio.StreamReader) -> dict[int, int]:
    """Reads the SETTINGS with which an HTTP/2 server begins."""
    length = int.from_bytes(await reader.readexactly(3))
    await reader.readexactly(6)
    content = await reader.readexactly(length)
    return dict(struct.iter_unpack(">HI", content))


@pytest.mark.parametrize(
    ("settings", "members"),
    [
        ({"workers": 2}, 2 * 2 + 1),
        ({"workers": 2, "colocate": True}, 2 * 4 + 1),
        ({"workers": 3, "shards": 2, "await_shards": 1, "standby": 1}, 2 * 3 + 2 * 3),
        ({}, 4096 + 1),
    ],
)
def test_members_have_connections_beside_those_of_strangers(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], members: int
) -> None:
    monkeypatch.setattr(bounds, "descriptor_share", lambda wanted, parts: wanted)
    options = dict(channel.control_options(ServerConfig(**settings).members))
    assert options["grpc.max_allowed_incoming_connections"] == members + SPARE_CONNECTIONS

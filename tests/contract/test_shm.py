"""What is particular to shared memory."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from hubring.ps.transport.mapping import enclose
from hubring.ps.transport.shm.packet import VERSION
from hubring.ps.transport.shm.transport import ShmTransport
from tests.support.transports.messages import PATIENCE, ask, is_echoed, noise, request
from tests.support.transports.serving import Serving, connected

LAYOUT = struct.Struct("<BB6xQQQQQQQ")
NOWHERE = (0, 0, 0)
REQUEST, SEGMENT = 3, 1


def train(*fields: int) -> bytes:
    """A packet of these fields, as it is sent."""
    packet = LAYOUT.pack(*fields)
    packet += struct.pack("<Q", xxh3_64_intdigest(packet))
    return struct.pack("<I", len(packet)) + packet


@contextlib.contextmanager
def stranger(address: str) -> Iterator[socket.socket]:
    """A socket to a shm listener on which anything can be said."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(PATIENCE)
        line.connect("\0" + address.removeprefix("shm://"))
        yield line


@pytest.mark.parametrize(
    "packet",
    [
        pytest.param(b"?", id="shorter than a descriptor"),
        pytest.param(train(1, REQUEST, 0, *NOWHERE, *NOWHERE), id="another version"),
        pytest.param(train(VERSION, 99, 0, *NOWHERE, *NOWHERE), id="an unknown kind"),
        pytest.param(train(VERSION, REQUEST, 0, 1, 0, 8, *NOWHERE), id="no segment"),
        pytest.param(train(VERSION, SEGMENT, 1, *NOWHERE, *NOWHERE), id="no descriptor"),
        pytest.param(bytes(60_000), id="a packet beyond all bounds"),
    ],
)
def test_shm_drops_a_peer_that_breaks_the_rules_and_serves_the_others(packet: bytes) -> None:
    transport = ShmTransport()
    with Serving(transport) as server, server.line() as honest:
        with stranger(server.address) as line:
            line.send(packet)
            assert line.recv(1) == b""
        assert is_echoed(honest, 1000)


@pytest.mark.parametrize(("offset", "length"), [(4096, 1), (4095, 2), (0, 4097), (2**64 - 1, 2)])
@pytest.mark.parametrize("place", ["payload", "into"])
def test_shm_refuses_places_beyond_the_segment(place: str, offset: int, length: int) -> None:
    places = (1, offset, length, *NOWHERE) if place == "payload" else (*NOWHERE, 1, offset, length)
    with Serving(ShmTransport()) as server, stranger(server.address) as line:
        descriptor = enclose(noise(4096))
        socket.send_fds(line, [train(VERSION, SEGMENT, 1, *NOWHERE, *NOWHERE)], [descriptor])
        os.close(descriptor)
        line.send(train(VERSION, REQUEST, 0, *places))
        assert line.recv(1) == b""


def test_shm_refuses_a_segment_that_could_shrink() -> None:
    with Serving(ShmTransport()) as server, stranger(server.address) as line:
        descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, 4096)
        socket.send_fds(line, [train(VERSION, SEGMENT, 1, *NOWHERE, *NOWHERE)], [descriptor])
        os.close(descriptor)
        assert line.recv(1) == b""


def held() -> int:
    """Returns how many files are open or mapped."""
    return len(os.listdir("/proc/self/fd")) + Path("/proc/self/maps").read_text().count("memfd:")


def test_shm_forgets_segments_that_nobody_uses() -> None:
    with connected(ShmTransport) as (transport, line):
        before = held()
        for number in range(20):
            memory = transport.allocate(200 << 20)  # too large to share a segment with others
            ask(line, request(number, memory[:10]))
        del memory
        # This process plays both ends: two descriptors for the worker's segment, one for the shard's.
        assert held() - before <= 2 * 2 * 3


SERVE = """
import sys
from tests.support.transports.serving import Serving, connected
from hubring.ps.transport.shm.transport import ShmTransport

with Serving(ShmTransport()) as server:
    print(server.address, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_shm_maps_nothing_that_has_a_name_on_the_host() -> None:
    transport, command = ShmTransport(), [sys.executable, "-c", SERVE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with contextlib.closing(transport.dial(process.stdout.readline().strip(), PATIENCE)) as line:
            ask(line, request(1, noise(1 << 20)), transport.allocate(1 << 20))
            for pid in (process.pid, os.getpid()):
                maps = Path(f"/proc/{pid}/maps").read_text()
                assert "memfd:hubring" in maps
                assert "/dev/shm" not in maps

"""Transports between processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hubring.ps.transport import registry
from hubring.ps.transport.shm.transport import ShmTransport
from tests.support.transports.messages import PATIENCE, ask, await_loss, content, noise, request

SERVE = """
import sys
from tests.support.transports.serving import Serving
from hubring.ps.transport.registry import transport

with Serving(transport(sys.argv[1])) as server:
    print(server.address, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def another_process(kind: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that echoes, and its address."""
    command = [sys.executable, "-c", SERVE, kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("kind", registry.FASTEST_FIRST)
def test_payloads_cross_processes_and_a_killed_one_is_missed_at_once(kind: str) -> None:
    transport = registry.transport(kind)
    with (
        another_process(kind) as (process, address),
        contextlib.closing(transport.dial(address, PATIENCE)) as line,
    ):
        payload, into = transport.allocate(3 << 20), transport.allocate(3 << 20)
        payload[:] = noise(payload.nbytes)
        reply = ask(line, request(1, payload), into)
        assert content(reply) == bytes(payload)
        assert reply.landed == (kind != "zmq")
        process.kill()
        await_loss(line)


@pytest.mark.slow
def test_shm_maps_nothing_that_has_a_name_on_the_host() -> None:
    transport = ShmTransport()
    with (
        another_process("shm") as (process, address),
        contextlib.closing(transport.dial(address, PATIENCE)) as line,
    ):
        ask(line, request(1, noise(1 << 20)), transport.allocate(1 << 20))
        for pid in (process.pid, os.getpid()):
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "memfd:hubring" in maps
            assert "/dev/shm" not in maps

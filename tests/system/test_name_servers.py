"""No program asks a name server, so one that does not answer holds nothing up."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.cluster import SMALL, Cluster, mounted

pytestmark = pytest.mark.slow

ASKS = (
    "from torch.distributed import TCPStore; TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)"
)


class Mute:
    """A name server that never answers.

    Args:
        folder: For the files of the programs that ask it.
    """

    def __init__(self, folder: Path) -> None:
        self.questions: list[bytes] = []
        # Name servers have one port, so tests that run side by side need an address each.
        self._place = (f"127.53.{os.getpid() >> 8 & 255}.{os.getpid() & 255}", 53)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(self._place)
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        file = folder / "resolv.conf"
        file.write_text(f"nameserver {self._place[0]}\noptions timeout:1 attempts:1\n")
        self.within = mounted(f"mount --bind {file} {Path('/etc/resolv.conf').resolve()}")

    def _listen(self) -> None:
        while question := self._socket.recv(512):
            self.questions.append(question)

    def close(self) -> None:
        self._socket.sendto(b"", self._place)
        self._thread.join()
        self._socket.close()


@pytest.fixture
def mute(tmp_path: Path) -> Iterator[Mute]:
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], check=False).returncode != 0:
        pytest.skip("mounts need root")
    server = Mute(tmp_path)
    yield server
    server.close()


@pytest.mark.full
def test_torchs_own_store_asks(mute: Mute) -> None:
    """Otherwise the tests below show nothing, and the ring could use it."""
    subprocess.run([*mute.within, sys.executable, "-c", ASKS], check=True)
    assert any(b"in-addr" in question for question in mute.questions)


@pytest.mark.full
def test_a_hub_starts(cluster: Cluster, mute: Mute) -> None:
    server, address = cluster.server("--workers", "2", "--once", within=mute.within)
    workers = cluster.ranks(address, 2, SMALL, "3", within=mute.within)
    assert [worker.done()["steps"] for worker in workers] == [3, 3]
    server.done()
    assert not mute.questions


def test_a_ring_starts_and_heals(cluster: Cluster, mute: Mute) -> None:
    server, address = cluster.server("--workers", "3", "--once", within=mute.within)
    flags = ["--topology", "ring", "--min-workers", "2"]
    workers = cluster.held(address, *flags, count=3, within=mute.within)
    workers[0].process.kill()
    cluster.go.touch()
    assert [worker.done()["size"] for worker in workers[1:]] == [2, 2]
    server.done()
    assert not mute.questions


@pytest.mark.full
def test_the_doctor_adds_over_gloo(cluster: Cluster, mute: Mute) -> None:
    """The doctor looks its own name up, which is one of its checks, and no address."""
    doctor = cluster.run("doctor", "hubring.ps.cli", "doctor", within=["env", *mute.within])  # a new Python
    doctor.wait()
    assert not any(b"in-addr" in question or b"ip6" in question for question in mute.questions)

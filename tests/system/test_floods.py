"""A flood from a stranger costs a bounded amount of memory, and no worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from tests.campaign.processes import listening, ports
from tests.support.processes.cluster import SMALL, Cluster, Program

pytestmark = [pytest.mark.slow, pytest.mark.full]

ATTACKS = (
    *("calls", "wrong_tokens", "continuations"),
    *("noise", "connections", "half_open", "pages", "zmq_frames", "zmq_handshakes", "shared_memory"),
)
MOST_BYTES = 64 << 20
WIRES = ("shm", "zmq", "grpc")
"""The transport of each worker, so that one flood meets all."""
WORKERS = len(WIRES)
MOST_LINES = 150
SAMPLE_SECONDS = 0.02
STATUS_SECONDS = 0.2


class Watch:
    """The memory of a server and its shard, and the age of the heartbeats that the server reports.

    Args:
        status: Asks the server, on a connection that is older than the flood, as a member's is.
        pids: Those of server and shard.
    """

    def __init__(self, status: Callable[[], dict[str, Any]], pids: list[int]) -> None:
        self._status = status
        self._processes = [psutil.Process(pid) for pid in pids]
        self._before = self._most = self._memory()
        self._ages: list[float] = []
        self._over = threading.Event()

    @property
    def growth(self) -> int:
        """Bytes by which the memory grew, at most."""
        return self._most - self._before

    @property
    def age(self) -> float:
        """Seconds since a worker's last heartbeat, at most; healthy workers send one per second."""
        return max(self._ages)

    def steps(self) -> list[int]:
        """Returns the steps of all workers."""
        workers = self._status()["workers"]
        self._ages += [worker["seconds_since_heartbeat"] for worker in workers]
        return [worker["step"] for worker in workers]

    def go_on(self) -> bool:
        """Whether all workers are there and have trained since they were first seen."""
        found = self.steps()
        return len(found) == WORKERS and min(found) > self._since

    @contextmanager
    def flood(self) -> Iterator[None]:
        """Measures while the body runs."""
        self._since = max(self.steps(), default=0)
        looks = [(SAMPLE_SECONDS, self._sample), (STATUS_SECONDS, self.steps)]
        threads = [threading.Thread(target=self._repeat, args=look) for look in looks]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _repeat(self, seconds: float, look: Callable[[], object]) -> None:
        while not self._over.wait(seconds):
            look()

    def _sample(self) -> None:
        self._most = max(self._most, self._memory())

    def _memory(self) -> int:
        return sum(process.memory_info().rss for process in self._processes)


def processes_of(server: Program, worker: Program, status: Callable[[], dict[str, Any]]) -> list[int]:
    """Waits until all workers train; returns the server's process, and that of its shard, which runs then."""
    trained = Watch(status, [])
    worker.until(lambda: len(trained.steps()) == WORKERS and min(trained.steps()) > 20, "steps")
    (shard,) = server.children("hubring.ps.shard.process")
    return [server.process.pid, shard]


def places_of(address: str, server: int, shards: list[int]) -> list[str]:
    """The arguments of a flood of a server with a page and its shards."""
    host, _, control = address.rpartition(":")
    found = ports(int(control), server, shards)
    (page,) = {*listening(server)} - {int(control)}
    return [host, control, str(page), *map(str, found.shards), *(f"@{name.decode()}" for name in found.shm)]


@pytest.mark.parametrize(
    ("wires", "limit"), [(WIRES, "-Sn 300"), (["shm"] * WORKERS, "-n 300"), (WIRES, "-n 1024")]
)
def test_silent_connections_leave_descriptors_for_the_members(
    cluster: Cluster, wires: Sequence[str], limit: str
) -> None:
    few = ["sh", "-c", f'ulimit {limit} && exec "$@"', "sh"]
    server, address = cluster.server("--workers", str(WORKERS), "--page-port", "0", within=few)
    workers = [cluster.worker(address, "--transport", wire, SMALL, "1000000") for wire in wires]
    with cluster.asking(address) as status:
        pids = processes_of(server, workers[0], status)
        watch = Watch(status, pids)
        before = server.said()
        with watch.flood():
            sent = cluster.run(
                "flood", "tests.support.scripts.flood", "connections", *places_of(address, pids[0], pids[1:])
            ).done()
        assert sent["open"] > 1024
        workers[0].until(watch.go_on, "more steps of all workers")
    logged = server.said().removeprefix(before)
    assert "Traceback" not in logged
    assert len(logged.splitlines()) < MOST_LINES, logged
    assert all(program.process.poll() is None for program in (server, *workers))
    assert all("connection lost" not in worker.said() for worker in workers)


def test_a_flood_costs_little_memory_and_no_worker(cluster: Cluster) -> None:
    server, address = cluster.server("--workers", str(WORKERS), "--page-port", "0")
    workers = [cluster.worker(address, "--transport", wire, SMALL, "1000000") for wire in WIRES]
    with cluster.asking(address) as status:
        pids = processes_of(server, workers[0], status)
        places = places_of(address, pids[0], pids[1:])
        for attack in ATTACKS:
            watch = Watch(status, pids)
            with watch.flood():
                sent = cluster.run(attack, "tests.support.scripts.flood", attack, *places).done()
            print(f"{attack}: {watch.growth / 1e6:.0f} MB, oldest heartbeat {watch.age:.2f} s, {sent}")
            assert "allowed" not in sent
            workers[0].until(watch.go_on, "more steps of all workers")
            assert watch.growth <= MOST_BYTES, attack
    assert all(program.process.poll() is None for program in (server, *workers))
    assert all(words not in server.said() for words in ("is lost", "Traceback"))

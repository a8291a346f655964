"""A flood from a stranger costs a bounded amount of memory, and no worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.campaign.fuzz.ports import listening, ports
from tests.support.processes.cluster import PATIENCE, SMALL, Cluster, Program

ATTACKS = ["calls", "wrong_tokens", "streams", "large_calls", "noise", "connections", "half_open", "pages", "zmq_frames", "shared_memory"]
MOST_BYTES = 64 << 20

class Watch:
    """The memory of some processes, and the age of the heartbeats that a server reports."""

    def __init__(self, cluster: Cluster, address: str, pids: list[int]) -> None:
        self._cluster, self._address = cluster, address
        self._processes = [psutil.Process(pid) for pid in pids]
        self.least = self.most = self.memory()
        self.age = 0.0
        self.slowest = 0.0
        self._over = threading.Event()

    def memory(self) -> int:
        return sum(process.memory_info().rss for process in self._processes)

    def steps(self) -> int:
        status = self._cluster.status(self._address)
        self.age = max(self.age, *(worker["seconds_since_heartbeat"] for worker in status["workers"]))
        return min(worker["step"] for worker in status["workers"])

    @contextmanager
    def during(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._sample), threading.Thread(target=self._ask)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _sample(self) -> None:
        while not self._over.wait(0.01):
            self.most = max(self.most, self.memory())

    def _ask(self) -> None:
        while not self._over.wait(0.1):
            began = time.monotonic()
            self.steps()
            self.slowest = max(self.slowest, time.monotonic() - began)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("wire", ["zmq"])
def test_a_flood_costs_little_memory_and_no_worker(cluster: Cluster, wire: str) -> None:
    server, address = cluster.server("--workers", "2", "--page-port", "0")
    pair = [cluster.worker(address, "--transport", wire, SMALL, "1000000") for _ in range(2)]
    (shard,) = server.children("hubring.ps.shard.process")
    pair[0].until(lambda: all(w["step"] > 20 for w in cluster.status(address)["workers"]) and len(cluster.status(address)["workers"])==2, "steps")
    host, _, control = address.rpartition(":")
    found = ports(int(control), server.process.pid, [shard])
    (page,) = set(listening(server.process.pid)) - {int(control)}
    import os
    for attack in os.environ.get("ATTACKS", "").split() or ATTACKS:
        attack, _, only = attack.partition("@")
        arguments = [attack, host, control, str(page), *map(str, found.shards), *(f"@{name.decode()}" for name in found.shm)]
        if only:
            every = [control, str(page), *map(str, found.shards)]
            port = every[int(only)]
            arguments = [attack, host, port, port, port]
        watch = Watch(cluster, address, [server.process.pid, shard])
        watch.steps()
        time.sleep(1)
        before = watch.memory(); each=[p.memory_info().rss for p in watch._processes]
        with watch.during():
            flood = cluster.run("flood", "tests.support.scripts.flood", *arguments)
            sent = flood.done()
        print("RESULT each", found.shards, [sorted(c.laddr.port for c in psutil.Process(x).net_connections("tcp") if c.status=="LISTEN") for x in (shard,)], [(p.memory_info().rss - m)>>20 for p, m in zip(watch._processes, each)]); print(f"RESULT {attack} {wire}: {(watch.most - before) / 1e6:.0f} MB, after {(watch.memory()-before)/1e6:.0f}, oldest heartbeat {watch.age:.2f} s, slowest status {watch.slowest:.2f}, {sent}")
        before = watch.steps()
        pair[0].until(lambda: watch.steps() > before, "more steps", PATIENCE)
        print("RESULT threads", psutil.Process(shard).num_threads(), psutil.Process(server.process.pid).num_threads())

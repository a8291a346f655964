"""The same hardship for hub and ring: distance and slow workers.

A latency is a lower bound: nothing that waits for somebody else's bytes is done before they can be there.
How much longer it takes is the machine's affair, and no test's.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import msgspec
import pytest

from hubring.workers.compare.plan.setting import Link, Setting
from hubring.workers.compare.run.site import LocalHosts, hosts, why_not
from hubring.workers.runtime.slowdown import SlowdownSettings, Straggler
from tests.support.processes.cluster import SCRIPTS, SMALL, Cluster, Program
from tests.support.training.assert_trained import assert_trained

pytestmark = pytest.mark.slow

FAR = Link(rate=5e8, latency=0.02, jitter=0.005)
LEAST = FAR.latency - FAR.jitter
"""Seconds, at the least, from host to host."""
EXCHANGE = str(SCRIPTS / "exchange.py")
PINGPONG = "tests.support.scripts.pingpong"
TOPOLOGIES = [
    ["--transport", "zmq"],
    pytest.param(["--transport", "grpc"], marks=pytest.mark.full),
    pytest.param(["--topology", "ring"], marks=pytest.mark.full),
]


def far(workers: int) -> Setting:
    if reason := why_not(FAR):
        pytest.skip(reason)
    return Setting(workers=workers, link=FAR)


def start(cluster: Cluster, there: LocalHosts, workers: int, *words: str) -> tuple[Program, list[Program]]:
    """A server, and workers on hosts of their own."""
    flags = ["--once", "--workers", str(workers), "--host", there.address("server"), "--insecure"]
    server, address = cluster.server(*flags, within=there.command("server", []))
    place = ["--insecure", "--world-size", str(workers), "--local-rank", "0"]
    return server, [
        cluster.worker(
            address, "--rank", str(rank), *place, *words, within=there.command(f"worker {rank}", [])
        )
        for rank in range(workers)
    ]


def test_plain_sockets_wait_for_the_distance_and_lose_nothing(cluster: Cluster) -> None:
    with hosts(far(1)) as there:
        asked = cluster.run("server", PINGPONG, there.address("server"), within=there.command("server", []))
        asked.until(lambda: asked.out.read_text().endswith("\n"), "port")
        words = [there.address("server"), asked.out.read_text().strip()]
        calling = cluster.run("caller", PINGPONG, *words, within=there.command("worker 0", []))
        assert calling.wait() == asked.wait() == 0, calling.said() + asked.said()
        seconds = json.loads(calling.out.read_text())
        assert min(seconds) >= 2 * LEAST
        assert sum(seconds) > len(seconds) * 2 * LEAST
        command = there.command("worker 0", ["ip", "-json", "-s", "link", "show", "eth0"])
        moved = json.loads(subprocess.check_output(command))[0]["stats64"]
        assert moved["tx"]["bytes"] > 4 << 20 > moved["rx"]["bytes"] > 0


@pytest.mark.full
@pytest.mark.parametrize("words", TOPOLOGIES, ids=lambda words: words[1])
def test_an_exchange_waits_for_the_distance(cluster: Cluster, words: list[str]) -> None:
    with hosts(far(2)) as there:
        server, workers = start(cluster, there, 2, *words, EXCHANGE, "5", str(1 << 20))
        metrics = [worker.done()["metrics"] for worker in workers]
        server.done()
    steps = list(zip(*(json.loads(each["seconds"]) for each in metrics), strict=True))
    if words[1] == "ring":  # what came last from one rank is still to reach the other
        assert all(max(step) >= LEAST for step in steps)
    else:  # up and down again, for every rank
        assert all(min(step) >= 2 * LEAST for step in steps)


@pytest.mark.parametrize("words", TOPOLOGIES, ids=lambda words: words[1])
def test_at_a_distance_the_same_is_trained(cluster: Cluster, tmp_path: Path, words: list[str]) -> None:
    final = tmp_path / "final.safetensors"
    with hosts(far(2)) as there:
        server, workers = start(cluster, there, 2, *words, "--save-parameters", str(final), SMALL, "10")
        assert [worker.done()["steps"] for worker in workers] == [10, 10]
        server.done()
    assert_trained(final, [range(2)] * 10)


@pytest.mark.parametrize(
    "words", [[], pytest.param(["--topology", "ring"], marks=pytest.mark.full)], ids=["hub", "ring"]
)
def test_a_straggler_keeps_hub_and_ring_waiting_alike(
    cluster: Cluster, tmp_path: Path, words: list[str]
) -> None:
    slowness = SlowdownSettings(Straggler(kind="pareto", seconds=0.05, ranks=(1,)), compute=0.01, seed=3)
    file = tmp_path / "hardship.json"
    file.write_bytes(msgspec.json.encode(slowness))
    with hosts(Setting(workers=2)) as there:
        server, workers = start(cluster, there, 2, *words, "--hardship", str(file), SMALL, "20")
        results = [worker.done() for worker in workers]
        server.done()
    extra = [sum(slowness.lateness(rank, step) for step in range(20)) for rank in range(2)]
    assert extra[1] > extra[0] == 0
    for rank, result in enumerate(results):
        slept = result["emulated"]["seconds"]
        assert extra[rank] < slept <= extra[rank] + 20 * 0.01  # of these 10 ms it computes some itself
        assert result["seconds"] >= extra[1] + 20 * 0.01  # in lockstep with the slow one
        assert result["exchange"]["exposed_seconds"] + slept <= result["seconds"]

"""The wire between hosts, at a rate that the processors outrun.

A link is as busy as its rate allows when an exchange takes what its bytes, and
the headers of the frames that they fill, take at that rate. Pushes and answers
go opposite ways at once, but a slice is answered when all ranks have pushed it:
n slices take the time of n + 1, so of 20 the best an exchange can show is 0.952.
"""

from __future__ import annotations

import json
from statistics import median
from subprocess import check_output
from typing import Any

import pytest

from hubring.workers.compare.plan.setting import BURST_BYTES, LINE_BYTES, PAYLOAD_BYTES, Link, Setting
from hubring.workers.compare.run.site import hosts, network, why_not
from tests.support.processes.cluster import SCRIPTS, Cluster

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(240)]

EXCHANGE = str(SCRIPTS / "exchange.py")
MEBI = 1 << 20
SLICES, SLICE_BYTES, STEPS = 20, MEBI, 3
NBYTES = SLICES * SLICE_BYTES
RATE = 50_000_000
"""Bytes a second each way, headers of frames included: little enough that other tests may run beside this."""
SENT = "/sys/class/net/eth0/statistics/tx_bytes"
HALF = 0.5
"""Of the rate: what an exchange cannot pass whose ways up and down take turns."""


@pytest.mark.parametrize(("workers", "colocated"), [(1, False), (2, False), (4, False), (2, True), (4, True)])
def test_zmq_fills_saturated_links(cluster: Cluster, workers: int, colocated: bool) -> None:
    if reason := why_not():
        pytest.skip(reason)
    metrics = _exchange(cluster, workers, colocated=colocated)
    assert {(each["sent"], each["received"]) for each in metrics} == {(NBYTES, NBYTES)}
    # The hub's link carries what all exchange; a colocated shard's, what its worker exchanges with the
    # other shards and they with its own.
    carried = NBYTES * (2 * (workers - 1) / workers if colocated else workers)
    least = carried * LINE_BYTES / PAYLOAD_BYTES / RATE
    steps = zip(*(json.loads(each["seconds"]) for each in metrics), strict=True)
    seconds = median(max(step) for step in steps)
    print(f"{workers} workers: {1e3 * seconds:.0f} ms, {least / seconds:.3f} of the rate")
    assert least / seconds > HALF
    assert seconds > least - BURST_BYTES / RATE, "faster than the link"


def _exchange(cluster: Cluster, workers: int, *, colocated: bool) -> list[dict[str, Any]]:
    """What each worker reports, on a host of its own."""
    with network(workers if colocated else workers + 1, Link(rate=8.0 * RATE)) as members:
        flags = ["--once", "--insecure", "--workers", str(workers), "--slice-bytes", str(SLICE_BYTES)]
        flags += ["--host", members[0].address, *(["--colocate"] if colocated else [])]
        server, address = cluster.server(*flags, within=members[0].command())
        place = ["--insecure", "--transport", "zmq", "--world-size", str(workers), "--local-rank", "0"]
        script = [*place, EXCHANGE, str(STEPS), str(NBYTES)]
        working = [
            cluster.worker(address, "--rank", str(rank), *script, within=host.command())
            for rank, host in enumerate(members[-workers:])
        ]
        metrics = [worker.done()["metrics"] for worker in working]
        server.done()
    return metrics


@pytest.mark.parametrize("topology", ["hub", "ring"])
def test_on_two_levels_a_host_s_link_carries_the_model_once_a_step(cluster: Cluster, topology: str) -> None:
    if reason := why_not():
        pytest.skip(reason)
    steps, nbytes = 20, 2 * MEBI
    flags = ["--once", "--insecure", "--workers", "4", "--slice-bytes", str(SLICE_BYTES)]
    with hosts(Setting(workers=4, link=Link(rate=1e9, sharing=2))) as there:
        within = [there.command(f"worker {rank}", []) for rank in range(4)]
        flags += ["--host", there.address("server")]
        server, address = cluster.server(*flags, within=there.command("server", []))
        place = ["--insecure", "--topology", topology, "--world-size", "4", "--local"]
        working = [
            cluster.worker(
                *(address, "--rank", str(rank), "--local-rank", str(there.local_rank(rank)), *place),
                *(EXCHANGE, str(steps), str(nbytes)),
                within=within[rank],
            )
            for rank in range(4)
        ]
        for worker in working:
            worker.done()
        server.done()
        # Around a ring of two hosts, too: 2(h-1)/h.
        sent = [int(check_output([*within[rank], "cat", SENT], text=True)) for rank in (0, 2)]
    carried = steps * nbytes
    assert all(carried < each < 1.5 * carried for each in sent), f"{sent} bytes, {carried} of gradients"

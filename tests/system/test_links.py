"""The wire between hosts, at a rate that the processors outrun."""

from __future__ import annotations

import pytest

from tests.system.cluster import Cluster
from tests.system.network import network, plain_goodput, why_not

EXCHANGE = __file__.replace("test_links", "exchange")
MEGABYTES, STEPS, WORKERS = 64, 3, 2


@pytest.mark.slow
def test_zmq_fills_the_servers_link(cluster: Cluster) -> None:
    """Gradients of all workers share the way into the server, parameters the way out, both at once."""
    if reason := why_not():
        pytest.skip(reason)
    with network(1 + WORKERS, "1gbit") as (hub, *others):
        plain = plain_goodput(hub, others, 20 << 20)
        flags = ["--once", "--host", hub.address, "--insecure", "--workers", str(WORKERS)]
        server, address = cluster.server(*flags, within=hub.command())
        arguments = ["--transport", "zmq", "--world-size", str(WORKERS), EXCHANGE, str(STEPS), str(MEGABYTES)]
        working = [
            cluster.worker(
                address, "--rank", str(rank), "--local-rank", "0", *arguments, within=host.command()
            )
            for rank, host in enumerate(others)
        ]
        metrics = [worker.done()["metrics"] for worker in working]
        server.done()
    seconds = max(each["seconds"] for each in metrics)
    goodput = WORKERS * (MEGABYTES << 20) / seconds
    print(f"plain sockets {plain / 1e6:.1f} MB/s, hub {goodput / 1e6:.1f} MB/s: {goodput / plain:.3f}")
    assert goodput > 0.9 * plain

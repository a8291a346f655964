"""The commands of a JobSet's pods, run as processes that are told what Kubernetes tells a pod."""

from __future__ import annotations

import pytest

from tests.support.processes.cluster import SMALL, Cluster
from tests.support.submissions import expanded, inside, jobs

pytestmark = pytest.mark.slow

SERVER = "hubring-server-0-0.hubring:5555"


@pytest.mark.parametrize(
    ("topology", "workers", "nodes"),
    [
        pytest.param("hub", 4, 2, id="two workers a pod"),
        pytest.param("ring", 2, None, id="a worker a pod", marks=pytest.mark.full),
        pytest.param("hub", 2, None, id="a worker a pod of a hub", marks=pytest.mark.full),
        pytest.param("ring", 4, 2, id="two workers a pod of a ring", marks=pytest.mark.full),
    ],
)
def test_pods_find_their_ranks(cluster: Cluster, topology: str, workers: int, nodes: int | None) -> None:
    found = jobs(SMALL, "10", workers=workers, nodes=nodes, topology=topology)
    program, start, *flags = inside(found["server"])["command"]
    assert (program, start, flags[:4]) == ("ps-server", "start", ["--host", "0.0.0.0", "--port", "5555"])
    server, address = cluster.server(*flags[4:])
    pods = []
    for index in range(found["worker"]["completions"]):
        program, *words = (expanded(word) for word in inside(found["worker"])["command"])
        assert program == "ps-worker"
        words[words.index(SERVER)] = address
        told = {"JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
        pods.append(cluster.run(f"pod{index}", "hubring.workers.programs.ps_worker", *words, variables=told))
    ended = [pod.done() for pod in pods]
    results = ended if nodes is None else [one for pod in ended for one in pod["workers"]]
    assert [(one["rank"], one["size"], one["steps"]) for one in results] == [
        (rank, workers, 10) for rank in range(workers)
    ]
    assert server.done()["finished"] == list(range(workers))

"""What a run says of where its time went: the traces, and the last lines' numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.cluster import SMALL, Cluster

pytestmark = pytest.mark.slow

STEPS = 20


def rows(path: Path) -> dict[str, list[dict[str, Any]]]:
    """A trace's spans by row."""
    events = json.loads(path.read_text())
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            spans[names[event["tid"]]].append(event)
    return spans


@pytest.mark.parametrize("topology", ["hub", pytest.param("ring", marks=pytest.mark.full)])
def test_a_run_is_traced_on_one_clock(cluster: Cluster, tmp_path: Path, topology: str) -> None:
    folder = tmp_path / "traces"
    server, address = cluster.server("--workers", "2", "--once", "--trace", str(folder))
    flags = ["--topology", topology, "--trace", str(folder), SMALL, str(STEPS)]
    results = [worker.done() for worker in cluster.ranks(address, 2, *flags)]
    told = server.done()["shards"]
    for rank, result in enumerate(results):
        trace = rows(folder / f"worker {rank}.trace.json")
        assert len(trace["steps"]) == STEPS
        exchanges = [span for name, spans in trace.items() if name.startswith("bucket") for span in spans]
        assert len(exchanges) >= STEPS
        began, ended = trace["steps"][0]["ts"], trace["steps"][-1]["ts"] + trace["steps"][-1]["dur"]
        assert all(began <= span["ts"] <= ended for span in exchanges)
        assert result["exchange"]["hidden_seconds"] >= 0
        assert result["usage"]["cpu_seconds"] > 0
        assert result["usage"]["peak_bytes"] > 10 << 20
    if topology == "hub":
        served = rows(folder / "shard0.trace.json")["serves"]
        pushes = [span for span in served if span["name"].startswith("push")]
        assert len(pushes) == told[0]["pushes"] == STEPS * len({span["name"] for span in pushes})
        first = rows(folder / "worker 0.trace.json")["steps"][0]["ts"]
        assert all(span["ts"] >= first for span in pushes), "a push was served before training began"
        assert told[0]["handled_seconds"] > 0
        assert set(told[0]["held_seconds"]) <= {"0", "1"}
        assert told[0]["peak_bytes"] > 10 << 20

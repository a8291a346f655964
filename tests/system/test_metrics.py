"""What a live job exports, against the page that lists it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hubring.ps.observe.metrics import CONTENT_TYPE
from tests.support.processes.cluster import Cluster, Program
from tests.support.processes.http import OPENER
from tests.support.unreported_metrics import UNREPORTED

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "deploy" / "METRICS.md"
HELD_AT = 20


class Listed(NamedTuple):
    """A metric, as the page has it."""

    type: str
    labels: frozenset[str]


def listed() -> dict[str, Listed]:
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `ps_")]
    cells = [[cell.strip() for cell in row] for row in rows]
    return {
        name.strip("`"): Listed(kind, frozenset(labels.split(", ")) - {""})
        for name, kind, labels, *_ in cells
    }


def exported(text: str) -> dict[str, Listed]:
    """What has a value."""
    found = {}
    for family in text_string_to_metric_families(text):
        name = family.name + "_total" * (family.type == "counter")
        for sample in family.samples:
            found[name] = Listed(family.type, frozenset(sample.labels) - {"le"})
    return found


def scrape(server: Program) -> str:
    """What the server exports now."""
    found = re.search(r"http://\S+/metrics", server.said())
    assert found, server.said()
    with OPENER.open(found[0], timeout=30) as answer:
        assert answer.headers["content-type"] == CONTENT_TYPE
        text: str = answer.read().decode()
    return text


def values(server: Program, name: str) -> dict[str, float]:
    """A metric's values by its only label."""
    families = text_string_to_metric_families(scrape(server))
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {next(iter(sample.labels.values())): sample.value for sample in samples}


def told(cluster: Cluster, address: str) -> list[int]:
    """The steps of the workers whose loss the hub has heard."""
    workers = cluster.status(address)["workers"]
    return [worker["step"] for worker in workers if worker["loss"] is not None]


OF_A_HUB = (
    "ps_checkpoint_age_seconds",
    "ps_checkpoint_interval_seconds",
    "ps_shard_oldest_version",
    "ps_shard_newest_version",
)


@pytest.mark.parametrize("topology", ["hub", pytest.param("ring", marks=pytest.mark.full)])
def test_a_live_job_exports_what_the_page_lists(cluster: Cluster, tmp_path: Path, topology: str) -> None:
    saved = ["--checkpoint-dir", str(tmp_path / "saved")] if topology == "hub" else []
    shards = ["--shards", "2", "--slice-bytes", "256", "--lease", "60", *saved]
    server, address = cluster.server("--workers", "2", "--once", "--page-port", "0", *shards)
    workers = cluster.held(address, "--topology", topology, at=HELD_AT)
    server.until(lambda: told(cluster, address) == [HELD_AT] * 2, f"step {HELD_AT}")
    server.until(lambda: "ps_shard_up" in exported(scrape(server)), "the shards' numbers")
    page = listed()
    assert len(page) > 30
    never = {*UNREPORTED, *(OF_A_HUB if topology == "ring" else ())}
    assert exported(scrape(server)) == {name: metric for name, metric in page.items() if name not in never}
    assert values(server, "ps_worker_steps_total") == {"0": HELD_AT, "1": HELD_AT}
    if topology == "hub":
        hides_nobody_else(server, cluster.status(address)["shards"][1]["pid"])
    cluster.go.touch()
    for program in (*workers, server):
        program.done()


def hides_nobody_else(server: Program, shard: int) -> None:
    """A stopped shard is down, and all others are still seen."""
    os.kill(shard, signal.SIGSTOP)
    server.until(lambda: values(server, "ps_shard_up") == {"0": 1, "1": 0}, "word of the stopped shard")
    assert values(server, "ps_shard_pushes_total").keys() == {"0"}
    assert values(server, "ps_worker_steps_total") == {"0": HELD_AT, "1": HELD_AT}
    os.kill(shard, signal.SIGCONT)
    server.until(lambda: values(server, "ps_shard_up") == {"0": 1, "1": 1}, "word that it goes on")

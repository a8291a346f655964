"""What a live job exports, against the page that lists it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ps.metrics import exposition
from tests.system.cluster import SMALL, Cluster

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "deploy" / "METRICS.md"
HELD_AT = 20
STEPS = 30


class Listed(NamedTuple):
    """A metric, as the page has it."""

    type: str
    labels: frozenset[str]


def listed() -> dict[str, Listed]:
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `ps_")]
    cells = [[cell.strip() for cell in row] for row in rows]
    return {
        name.strip("`"): Listed(kind, frozenset(labels.split(", ")) - {""}) for name, kind, labels, *_ in cells
    }


def exported(text: str) -> dict[str, Listed]:
    """What has a value."""
    found = {}
    for family in text_string_to_metric_families(text):
        name = family.name + "_total" * (family.type == "counter")
        for sample in family.samples:
            found[name] = Listed(family.type, frozenset(sample.labels) - {"le"})
    return found


@pytest.mark.parametrize("topology", ["hub", "ring"])
def test_a_live_job_exports_what_the_page_lists(cluster: Cluster, tmp_path: Path, topology: str) -> None:
    saved = ["--checkpoint-dir", str(tmp_path / "saved")] if topology == "hub" else []
    server, address = cluster.server("--workers", "2", "--shards", "2", "--slice-bytes", "256", "--once", *saved)
    go = tmp_path / "go"
    script = [SMALL, str(STEPS), "16", "hold", str(go), str(HELD_AT)]
    pair = [cluster.worker(address, "--topology", topology, *script) for _ in range(2)]
    server.until(lambda: held(cluster, address) == [HELD_AT] * 2, f"step {HELD_AT}")
    page = listed()
    assert len(page) > 30
    never = {"ps_checkpoint_age_seconds", "ps_checkpoint_interval_seconds"} if topology == "ring" else set()
    told = exported(exposition(cluster.status(address)).decode())
    assert told == {name: metric for name, metric in page.items() if name not in never}
    go.touch()
    for worker in pair:
        worker.done()
    server.done()


def held(cluster: Cluster, address: str) -> list[int]:
    """The steps of the workers whose loss the hub has heard."""
    return [worker["step"] for worker in cluster.status(address)["workers"] if worker["loss"] is not None]

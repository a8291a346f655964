"""Models of which every slice is whole pages: on one host their parameters are shown, not sent."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.processes.cluster import SCRIPTS, SMALL, Cluster, Program, await_all

pytestmark = pytest.mark.slow

UNEVEN = str(SCRIPTS / "uneven.py")
WIDTH = 140_000
"""Of the model's first layer, of 8 rows: 4.3 MiB."""
SLICES = ["--slice-bytes", str(64 << 10)]
KINDS = {"own": [*SLICES, "--shards", "2"], "colocated": [*SLICES, "--colocate"]}


def train(cluster: Cluster, name: str, server: list[str], *worker: str) -> dict[str, torch.Tensor]:
    """Two workers' parameters after 20 steps."""
    program, address = cluster.server("--workers", "2", "--once", *server, name=name)
    final = cluster.folder / f"{name}.safetensors"
    script = [*worker, "--save-parameters", str(final), SMALL, "20", str(WIDTH)]
    for one in cluster.ranks(address, 2, *script):
        assert one.done()["steps"] == 20
    assert all(shard["pushes"] > 0 for shard in program.done()["shards"])
    return load_file(final)


def interrupted(cluster: Cluster, name: str, flags: list[str]) -> None:
    """Two workers that are stopped after 10 steps or 11."""
    server, address = cluster.server("--workers", "2", "--once", *flags, name=name)
    both = cluster.ranks(address, 2, SMALL, "20", str(WIDTH), "hold", str(cluster.go), "10")
    await_all(both, "holding at 10")
    parameters = 4 * 8 * WIDTH
    assert all(shown(one) >= parameters for one in both)
    both[0].process.send_signal(signal.SIGUSR1)  # it ends no step before all shards know
    both[0].until_said("SIGUSR1")
    cluster.go.touch()
    for program in (*both, server):
        program.done(75)


def shown(worker: Program) -> int:
    """Bytes of others' memory in this worker's windows (proc(5), maps).

    It maps these files only privately, twice each; of its own files it shares a part with the shards.
    """
    lines = Path(f"/proc/{worker.process.pid}/maps").read_text().splitlines()
    mapped = [line.split() for line in lines if "memfd:hubring" in line]
    own = {inode for _, access, _, _, inode, *_ in mapped if access.endswith("s")}
    others = [addresses.split("-") for addresses, _, _, _, inode, *_ in mapped if inode not in own]
    return sum(int(end, 16) - int(start, 16) for start, end in others) // 2


@pytest.mark.full
def test_every_hub_ends_in_the_same_bytes_and_resumes_another(cluster: Cluster, tmp_path: Path) -> None:
    sent = train(cluster, "sent", SLICES, "--transport", "zmq")
    ends = {kind: train(cluster, kind, flags) for kind, flags in KINDS.items()}
    saved = ["--checkpoint-dir", str(tmp_path / "saved")]
    interrupted(cluster, "begun", [*KINDS["own"], *saved])
    ends["resumed"] = train(cluster, "resumed", [*KINDS["colocated"], *saved])
    assert (cluster.folder / "resumed.err").read_text().count("resumes   step 1") == 1
    for kind, end in ends.items():
        assert all(torch.equal(sent[name], end[name]) for name in sent), kind


@pytest.mark.parametrize("kind", ["own", pytest.param("colocated", marks=pytest.mark.full)])
def test_the_worker_that_leaves_first_keeps_the_parameters_of_its_last_step(
    cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    server, address = cluster.server("--workers", "2", "--once", "--lease", "30", *KINDS[kind])
    for one in cluster.ranks(address, 2, UNEVEN, "20", str(WIDTH), str(tmp_path / "go")):
        one.done()
    assert server.done()["finished"] == [0, 1]

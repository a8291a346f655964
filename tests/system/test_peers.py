"""Every peer trains the script that our rows train, and ends in the ring's parameters."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hubring.workers.compare.gate import recorded_steps, same_parameters, synchronous_steps
from hubring.workers.compare.run.programs import PeerPrograms
from hubring.workers.compare.run.site import LocalHosts
from hubring.workers.peers.rows import PEERS, find_peer
from tests.support.needs import do_without
from tests.support.processes.cluster import SMALL, Cluster

pytestmark = pytest.mark.slow

MARKS = {
    "mpi": pytest.mark.packages,
    "ray": pytest.mark.packages,
    "rpc": pytest.mark.full,
    "fsdp2": pytest.mark.full,
    "zero1": pytest.mark.full,
}
SCRIPT, SCRIPT_STEPS = [SMALL, "20"], 20
DIGITS, DIGITS_STEPS = ["--job", "digits", "--", "--epochs", "1"], 22


def ring(cluster: Cluster, words: Sequence[str]) -> same_parameters.Parameters:
    _, address = cluster.server("--workers", "2", "--once")
    saved = cluster.folder / "ring.safetensors"
    flags = ["--topology", "ring", "--world-size", "2"]
    for worker in cluster.ranks(address, 2, *flags, "--save-parameters", str(saved), *words):
        worker.done()
    return load_file(saved)


def like_the_ring(
    cluster: Cluster, name: str, words: Sequence[str], servers: int = 1
) -> list[dict[str, Any]]:
    """Trains by a peer and by a ring: both end in the same parameters; returns the peer's results by rank."""
    row = find_peer(name)
    if missing := row.missing():
        do_without(missing)
    programs = PeerPrograms(row, 2, cluster.folder, LocalHosts(), servers=servers)
    serving = [cluster.start(f"{name} {each.name}", each.argv) for each in programs.server_programs()]
    if row.leads:
        serving[0].until(lambda: programs.meet.exists() and programs.meet.read_text() != "", "address")
    started = programs.worker_programs(lambda rank: [*told(cluster.folder, rank), *words])
    for each in [*(cluster.start(f"{name} {one.name}", one.argv) for one in started), *serving]:
        assert each.wait() == 0, f"{each.name}:\n{each.said()}"
    found = load_file(cluster.folder / "peer.safetensors")
    apart, where, _ = same_parameters.difference(ring(cluster, words), found, same_parameters.TOLERANCE)
    assert apart <= same_parameters.TOLERANCE, where
    return [dict(programs.result(rank)) for rank in range(2)]


def told(folder: Path, rank: int) -> list[str]:
    save = ["--save-parameters", str(folder / "peer.safetensors")] if rank == 0 else []
    audit = ["--audit", str(folder / f"audit {rank}.msgpack")]
    return ["--record", str(folder / f"record {rank}.jsonl"), *audit, *save]


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in PEERS])
def test_a_peer_ends_in_the_rings_parameters_and_reports_as_our_rows_do(cluster: Cluster, name: str) -> None:
    # The script goes without torch's compiler, which DDP and FSDP ask for a word.
    grouped = find_peer(name).grouped
    words, steps = (DIGITS, DIGITS_STEPS) if grouped else (SCRIPT, SCRIPT_STEPS)
    results = like_the_ring(cluster, name, words)
    assert [(one["rank"], one["size"], one["topology"]) for one in results] == [(0, 2, name), (1, 2, name)]
    assert all(one["steps"] == steps and one["exit_code"] == 0 for one in results)
    assert all(one["exchange"]["bytes_sent"] > 0 for one in results)
    exposed = [one["exchange"]["exposed_seconds"] for one in results]
    assert exposed == [None, None] if grouped else min(exposed) > 0
    lines = (cluster.folder / "record 1.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, steps + 1))
    assert_recorded(cluster.folder, steps)


def assert_recorded(folder: Path, steps: int) -> None:
    ranks = recorded_steps.joined(
        [recorded_steps.read(folder / f"audit {rank}.msgpack") for rank in range(2)]
    )
    checked = synchronous_steps.check([rank.trainers for rank in ranks], same_parameters.TOLERANCE)
    assert (checked.judged, checked.unjudged, checked.fault) == (steps, "", "")


TWICE = """
import math
import torch
from torch.nn import Linear, Module, ModuleList
import hubring

class Twice(Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.last, self.layers = Linear(5, 1), ModuleList([Linear(5, 5), Linear(5, 5), Linear(5, 5)])

    def forward(self, x):
        for layer in (*self.layers, self.layers[0]):
            x = layer(x).tanh() * self.scale
        return self.last(x)
"""

EVALUATES = f"""{TWICE}
hubring.init()
torch.manual_seed(hubring.rank())  # workers start from rank 0's parameters
model = Twice()
optimizer = hubring.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
for step in range(10):
    torch.manual_seed(2 * step + hubring.rank())
    optimizer.zero_grad()
    model(torch.randn(4, 5)).pow(2).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    schedule.step()
    hubring.report(samples=4)
    if step % 3 == 0 and hubring.rank() == 0:
        with torch.no_grad():
            hubring.report(part=model.last(torch.ones(1, 5)).item(), whole=model(torch.ones(1, 5)).item())
    if step % 2 == 0:
        hubring.barrier("now and then")
"""


LEAVES_STEPS_OUT = f"""{TWICE}
hubring.init()
torch.manual_seed(0)
model = Twice()
optimizer = hubring.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for step in range(10):
    left_out = step in (4, 9)
    if left_out and hubring.topology() == "ring":
        continue
    torch.manual_seed(2 * step + hubring.rank())
    optimizer.zero_grad()
    loss = model(torch.randn(4, 5)).pow(2).mean()
    if hubring.rank() == 0 and step % 2:
        hubring.report(before_backward=math.nan)
    loss.backward()
    if hubring.rank() == 0:
        hubring.report(after_backward=math.nan)
    if not left_out:
        optimizer.step()
    elif hubring.rank() == 0:
        with torch.no_grad():
            hubring.report(whole=model(torch.ones(1, 5)).item())
    hubring.report(samples=4)
hubring.barrier("end")
"""


@pytest.mark.full
@pytest.mark.parametrize("name", ["fsdp2", "zero1"])
@pytest.mark.parametrize("script", [EVALUATES, LEAVES_STEPS_OUT], ids=["evaluates", "leaves steps out"])
def test_rank_0_may_evaluate_or_report_alone_and_all_may_leave_steps_out(
    cluster: Cluster, tmp_path: Path, name: str, script: str
) -> None:
    file = tmp_path / "train.py"
    file.write_text(script)
    like_the_ring(cluster, name, [str(file)])
    if script == EVALUATES:
        assert_recorded(cluster.folder, 10)


@pytest.mark.full
def test_rpcs_workers_end_the_same_on_two_servers(cluster: Cluster) -> None:
    like_the_ring(cluster, "rpc", SCRIPT, servers=2)


@pytest.mark.full
def test_a_worker_that_fails_says_why_and_takes_the_others_along(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import hubring\nhubring.init()\nassert hubring.rank() == 0, 'this rank is broken'\n"
        "hubring.barrier('never')\n"
    )
    programs = PeerPrograms(find_peer("ddp"), 2, cluster.folder, LocalHosts())
    first, second = [
        cluster.start(one.name, one.argv) for one in programs.worker_programs(lambda _: [str(script)])
    ]
    assert (second.wait(), first.wait()) == (1, 1)
    assert "this rank is broken" in second.result()["error"]
    assert "this rank is broken" in second.said()
    assert "error" in first.result()


@pytest.mark.full
def test_a_peer_that_is_not_installed_ends_with_what_to_install(cluster: Cluster) -> None:
    program = cluster.start(
        "hidden",
        [
            sys.executable,
            "-c",
            "from hubring.workers.compare.run.peers import run\nfrom hubring.ps.core import packages\n"
            "from hubring.workers.peers import rows\n"
            "packages.find_spec = lambda name: None\n"
            "rows.which = lambda name: name\n"
            "run.main()",
            *("--peer", "ray", "--rank", "0", "--world-size", "1", "--meet", "/nowhere", SMALL, "1"),
        ],
    )
    result = program.done(code=2)
    assert "row ray: ray is not installed; install it with: pip install ray" in result["error"]

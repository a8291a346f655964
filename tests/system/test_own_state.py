"""What only the workers have survives a stop and a kill: buffers, frozen parameters, residuals."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.support.processes.cluster import SCRIPTS, Cluster
from tests.support.processes.fork_server import ForkServer
from tests.support.scripts.own_state import BEGIN, Model

pytestmark = pytest.mark.slow

PS_RUN = "hubring.workers.programs.ps_run"
SCRIPT = str(SCRIPTS / "own_state.py")
KINDS = {"hub": [], "aggregate": ["--aggregate"], "ring": ["--topology", "ring"]}
CLIPS = "clips"
"""A hub that finds in its first step that it must average."""
CASES = [
    *product(KINDS, [""], ["stop", "kill"]),
    ("hub", "topk:0.1", "stop"),
    ("aggregate", "int8", "stop"),
    ("ring", "sign", "kill"),
    ("aggregate", "powersgd:1", "kill"),
    ("ring", "powersgd:1", "kill"),
    (CLIPS, "", "kill"),
]
"""Every codec but PowerSGD keeps what it leaves out in the same way, so one stands for all of a topology."""
FIRST = {("hub", "", "kill"), ("aggregate", "int8", "stop")}
"""What `make test` runs of them."""

States = list[dict[str, torch.Tensor]]


def run(cluster: Cluster, folder: Path, kind: str, codec: str, how: str) -> States:
    """Runs the job until it has finished; returns what each rank ended with."""
    folder.mkdir()
    flags = [*KINDS.get(kind, []), *(["--compress", codec] if codec else [])]
    saves = ["--checkpoint-dir", str(folder / "saved"), "--checkpoint-every", "0.3"]
    words = ["-n", "2", *flags, *saves, SCRIPT, str(folder), how, kind, *([] if codec else ["thaws"])]
    program = cluster.run(f"{kind}-{folder.name}", PS_RUN, *words)
    if how == "stop":
        assert program.wait() == 75, program.said()
        program = cluster.run(f"{kind}-{folder.name}-again", PS_RUN, *words)
    assert program.wait() == 0, program.said()
    assert ("restarting the job" in program.said()) == (how == "kill")
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def wholes(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], States]:
    """Returns what an undisturbed job ends with."""

    @cache
    def whole(kind: str, codec: str) -> States:
        with Cluster(tmp_path_factory.mktemp(kind), fork_server) as cluster:
            return run(cluster, cluster.folder / "whole", kind, codec, "whole")

    return whole


@pytest.mark.parametrize(
    ("kind", "codec", "how"),
    [pytest.param(*case, marks=() if case in FIRST else pytest.mark.full) for case in CASES],
)
def test_a_job_that_goes_on_from_a_checkpoint_ends_in_the_same_state_on_every_rank(
    cluster: Cluster, tmp_path: Path, wholes: Callable[[str, str], States], kind: str, codec: str, how: str
) -> None:
    expected, found = wholes(kind, codec), run(cluster, tmp_path / how, kind, codec, how)
    for rank, (whole, state) in enumerate(zip(expected, found, strict=True)):
        assert whole.keys() == state.keys()
        assert not [name for name in whole if not whole[name].equal(state[name])], f"rank {rank}"


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_worker_that_takes_a_lost_ones_place_gets_the_state_of_a_live_one(
    cluster: Cluster, tmp_path: Path, rank: int
) -> None:
    """Also without checkpoints."""
    _, address = cluster.server("--workers", "2", "--once")
    words = (SCRIPT, str(tmp_path), f"hold {rank}")
    pair = cluster.ranks(address, 2, *words)
    pair[rank].until((tmp_path / "holding").exists, "hold")
    pair[rank].process.kill()
    pair[1 - rank].until(lambda: len(cluster.status(address)["workers"]) == 1, "place")
    again = cluster.worker(address, "--rank", str(rank), *words)
    again.until((tmp_path / "saved").exists, "state")
    state = torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True)
    assert state["norm.num_batches_tracked"] > BEGIN
    assert state["frozen.weight"].equal(Model(life=0).state_dict()["frozen.weight"])

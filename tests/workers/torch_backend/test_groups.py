"""Scripts that only name the backend train and exchange; their ranks are processes."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hubring.ps.config.environment import environment
from hubring.workers.localrun.server import LocalServer
from hubring.workers.torch_backend import job
from hubring.workers.torch_backend.member import GroupMember
from tests.workers.torch_backend import scripts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def ranks_are_forks() -> None:
    """Their parent has imported torch, and ends with this process."""
    forkserver.set_forkserver_preload(["torch._dynamo", scripts.__name__])
    forkserver.ensure_running()


@pytest.mark.parametrize("imports", ["import hubring, torch", "import torch, hubring"])
def test_the_name_is_known_in_whichever_order_a_script_imports(imports: str) -> None:
    asked = "assert 'hubring' in torch.distributed.Backend.backend_list"
    subprocess.run([sys.executable, "-c", f"{imports}\n{asked}"], check=True)


def test_ddp_trains_as_with_gradients_averaged_by_hand(tmp_path: Path) -> None:
    scripts.run(scripts.train, 2, tmp_path, "spawn")  # as scripts do


def test_operations_messages_and_groups_do_what_gloo_does(tmp_path: Path) -> None:
    scripts.run(scripts.operate, 3, tmp_path)


@pytest.mark.parametrize("script", [scripts.meet, scripts.return_under_a_launcher])
def test_ranks_join_the_hub_that_script_or_launcher_name(tmp_path: Path, script: scripts.Script) -> None:
    with LocalServer(2, ["--no-page"], environment()) as server:
        (tmp_path / "address").write_text(server.address)
        scripts.run(script, 2, tmp_path)


def test_a_group_that_cannot_be_made_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(ranks: tuple[int, ...]) -> None:
        raise RuntimeError(f"no group of {ranks}")

    left: list[str] = []
    communicator: Any = SimpleNamespace(size=3, open_group=refuse)
    monkeypatch.setattr(job, "enter", lambda *_: job.JobPlace(communicator, (0, 1)))
    monkeypatch.setattr(job, "leave", left.append)
    with pytest.raises(RuntimeError, match=r"no group of \(0, 1\)"):
        GroupMember().open("g", dist.HashStore(), (0, 1), 0, timedelta(seconds=1))  # type: ignore[attr-defined]
    assert left == ["group g was not made: no group of (0, 1)"]


def test_a_hook_of_ddp_averages_compressed_gradients_over_gloo(tmp_path: Path) -> None:
    scripts.run(scripts.compress, 2, tmp_path)


@pytest.mark.parametrize("script", [scripts.lose, scripts.lose_in_backward])
def test_a_killed_rank_is_named_to_the_others(tmp_path: Path, script: scripts.Script) -> None:
    scripts.run_to_the_end(script, 3, tmp_path)
    for rank in (0, 2):
        assert "rank 1 is lost" in (tmp_path / f"error{rank}").read_text()

from __future__ import annotations

import json
import os

import pytest

from hubring.ps.config import terminal
from hubring.ps.core.errors import ConfigError
from hubring.workers.programs import ps_worker


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith(("PS_", "SLURM_", "OMPI_", "PMIX_", "KUBERNETES_")) or name in explain_names():
            monkeypatch.delenv(name)


def explain_names() -> set[str]:
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS"}


def test_each_value_names_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PS_SERVER", "hub:1")
    report = ps_worker.gather({"local_rank": 0})
    assert report["rank"] == {"value": 3, "source": "SLURM_PROCID=3"}
    assert report["world size"] == {"value": 4, "source": "SLURM_STEP_NUM_TASKS=4"}
    assert report["local rank"] == {"value": 0, "source": "--local-rank 0"}
    assert report["launcher"] == {"value": "slurm", "source": "SLURM_STEP_ID=0"}
    assert report["server"] == {"value": "hub:1", "source": "PS_SERVER='hub:1' in the environment"}
    assert report["device"]["value"] == "cpu"
    assert "TORCHELASTIC_RUN_ID" in report["absent"]["torchrun"]


def test_a_setting_is_told_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_RANK", "1")
    monkeypatch.setenv("PS_SERVER", "hub:1")
    assert ps_worker.gather({})["rank"] == {"value": 1, "source": "PS_RANK='1' in the environment"}


def test_a_rank_that_is_not_set_is_assigned_by_the_server() -> None:
    report = ps_worker.gather({})
    assert report["rank"]["value"] is None
    assert "the server assigns it" in report["rank"]["source"]
    lines = ps_worker.lines(report, explain=True)
    assert any(line.startswith("not set     slurm: SLURM_STEP_ID, SLURM_PROCID") for line in lines)
    assert any("a Compose replica cannot see its own number" in line for line in lines)
    assert ps_worker.lines(report, explain=False)[0] == "rank        -"


def test_sources_that_disagree_are_told_as_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=r"--rank 0 and RANK=1"):
        ps_worker.gather({"rank": 0})
    with pytest.raises(SystemExit) as end:
        terminal.run(ps_worker.env_app, "ps-worker env", ["--rank", "0", "--json"])
    assert end.value.code == 78
    assert json.loads(capsys.readouterr().out)["exit_code"] == 78

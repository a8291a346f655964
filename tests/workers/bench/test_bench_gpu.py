"""The bench's rows on a GPU, as far as a machine without one can tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from hubring.ps.core.errors import ConfigError
from hubring.workers.bench import cli, job
from hubring.workers.bench.case import takes_part
from hubring.workers.bench.job import BenchJob
from hubring.workers.bench.row import ROWS
from hubring.workers.bench.team import BenchTeam
from hubring.workers.peers import machine
from hubring.workers.peers.processes import RunProcesses, clean_environment

ON_GPU = ["ddp-nccl", "hub-cuda", "hub-shm-gpu", "ring-nccl", "bound-cuda"]


@pytest.mark.parametrize("name", ON_GPU)
def test_rows_on_a_gpu_are_left_out_where_there_is_none(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not set(ON_GPU) & {row.name for row in cli.rows_of(None)}
    assert f"skipping {name}: torch finds no CUDA device on this host\n" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"--rows {name}: torch finds no CUDA device on this host"):
        cli.rows_of(name)


def test_rows_on_a_gpu_take_part_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [row.name for row in cli.rows_of(None) if row.device == "cuda"] == ON_GPU


@pytest.mark.parametrize("shape", job.SHAPES)
def test_rows_on_a_gpu_exchange_and_neither_train_nor_stand_beside_codecs(shape: str) -> None:
    found = job.find_shape(shape)
    expected = [] if found.trained or found.coded else ON_GPU
    assert [name for name in ON_GPU if takes_part(ROWS[name], found)] == expected


def test_ranks_that_share_a_gpu_claim_hosts_of_their_own() -> None:
    assert machine.gpu_variables(1, size=2, gpus=2, environment={}) == {}
    shared = [machine.gpu_variables(rank, size=2, gpus=1, environment={}) for rank in range(2)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in shared] == ["0", "0"]
    assert len({one["NCCL_HOSTID"] for one in shared}) == 2
    given = {"CUDA_VISIBLE_DEVICES": "3,4"}
    assert machine.gpu_variables(0, size=4, gpus=2, environment=given)["CUDA_VISIBLE_DEVICES"] == "3"


def test_a_peer_on_a_gpu_meets_over_nccl() -> None:
    job = BenchJob(shape="lone", optimizer="sgd", size=2, directory="")
    assert job.seat(1).backend == "gloo"
    on_gpu = msgspec.structs.replace(job, device="cuda")
    assert BenchJob.decode(on_gpu.encode()).seat(1).backend == "nccl"


# How they start: the same sides on the CPU, by the path of a row on a GPU.


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("row", ["ddp-gloo", "hub-shm"])
def test_ranks_of_a_row_on_a_gpu_are_fresh_processes_that_know_theirs(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "gpu_count", lambda: 1)
    job = BenchJob(shape="lone", optimizer="sgd", size=2, directory=str(tmp_path))
    told = replace(ROWS[row], device="cuda")
    with RunProcesses(tmp_path, clean_environment(1), timeout=90) as processes:
        team = BenchTeam(told, job, None, processes)
        team.start()
        team.meet()
        turn = team.turn(2)
        ranks = [process for process in processes.started if " rank " in process.name]
        seen = [psutil.Process(process.pid).environ() for process in ranks]
        team.dismiss()
        while processes.running():
            processes.pause("the end")
    assert (len(turn.seconds), turn.wrong) == (2, 0)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == ["0", "0"]
    assert [each["NCCL_HOSTID"] for each in seen] == ["rank0", "rank1"]

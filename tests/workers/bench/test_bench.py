"""The bench times what it is asked for, and shows what came of it."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch

from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.job.sharding import runs_within
from hubring.workers.bench import cli, job
from hubring.workers.bench.case import (
    HEAD,
    TURN_SECONDS,
    BenchCase,
    bench_entry,
    fitting,
    row_bytes,
    takes_part,
    trained,
)
from hubring.workers.bench.job import BenchJob, MemberLine
from hubring.workers.bench.row import ROWS
from hubring.workers.bench.team import BenchTeam, BenchTurn
from hubring.workers.peers.processes import ProcessFailed, RunProcesses, clean_environment
from tests.support.processes.cluster import Cluster

# What is asked for.


def test_resnet50_has_the_parameters_of_the_paper() -> None:
    tensors = job.resnet50()
    assert (len(tensors), sum(prod(dims) for dims in tensors)) == (161, 25_557_032)
    assert (tensors[0], tensors[-2:]) == ((64, 3, 7, 7), [(1000, 2048), (1000,)])


@pytest.mark.parametrize("shape", ["digits", "mlp"])
def test_the_shapes_of_what_is_trained_are_its_parameters(shape: str) -> None:
    pytest.importorskip("sklearn")
    from hubring.workers.bench.train import network

    with torch.device("meta"):
        net = network(shape)
    assert [tuple(parameter.shape) for parameter in net.parameters()] == job.find_shape(shape).tensors(0)


def test_a_shape_is_exchanged_by_the_rows_it_is_for() -> None:
    def names(shape: str) -> list[str]:
        return [row.name for row in ROWS.values() if takes_part(row, job.find_shape(shape))]

    assert not {"ring-bf16", "train-alone"} & set(names("flat"))
    assert names("coded") == [
        *("hub-zmq", "hub-zmq-bf16", "hub-zmq-int8", "ring", "ring-bf16", "ring-gloo", "ring-gloo-bf16")
    ]
    assert "train-alone" in names("mlp")
    assert "rpc" not in names("mlp")


def test_a_slow_row_takes_fewer_steps_of_a_turn_and_at_least_one() -> None:
    assert [fitting(BenchTurn([each, 9.0], 0), 3) for each in (0.001, TURN_SECONDS / 2, 5.0)] == [3, 2, 1]


def test_rows_that_do_not_fit_into_memory_run_in_groups() -> None:
    assert runs_within([3, 3, 3], 9, int) == [[3, 3, 3]]
    assert runs_within([3, 3, 3, 2], 6, int) == [[3, 3], [3, 2]]
    assert runs_within([9, 1, 9, 1], 2, int) == [[9], [1], [9], [1]]
    small, large = (row_bytes(ROWS["hub-shm"], 4, None, nbytes) for nbytes in (0, 100 << 20))
    assert large - small > (4 + 2) * (100 << 20), "each rank and each shard has the model more than once"
    assert row_bytes(ROWS["hub-shm"], 4, None, 100 << 20, trains=True) > large


def test_cases_are_read_and_the_standard_ones_are_cases() -> None:
    assert cli.cases_of("2:resnet50:adam, 1:lone:sgd") == [
        BenchCase(2, "resnet50", "adam"),
        BenchCase(1, "lone", "sgd"),
    ]
    assert len(cli.cases_of(None)) > 5


def test_a_killed_process_of_any_row_ends_the_wait_for_a_member(tmp_path: Path) -> None:
    job = BenchJob(shape="lone", optimizer="sgd", size=1, directory=str(tmp_path))
    with RunProcesses(tmp_path, clean_environment(1), timeout=300) as processes:
        team = BenchTeam(ROWS["gloo+sgd"], job, None, processes)
        silent = MemberLine.dial(job.control)
        team.meet()
        processes.start("another row", ["sh", "-c", "kill -9 $$"])
        with pytest.raises(ProcessFailed, match=r"another row was killed by signal 9 \(SIGKILL\)"):
            team.turn(1)
        silent.close()


@pytest.mark.parametrize("text", ["2:flat", "0:flat:sgd", "two:flat:sgd", "2:flat:lamb", "2:round:sgd"])
def test_a_case_that_means_nothing_is_told(text: str) -> None:
    with pytest.raises(UsageError, match=rf"--cases: '{text}'|no shape 'round'"):
        cli.cases_of(text)


def test_a_row_asked_for_that_cannot_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="--rows mpi: mpirun is not installed"):
        cli.rows_of("gloo+sgd,mpi")
    assert "mpi" not in [row.name for row in cli.rows_of(None)]
    with pytest.raises(UsageError, match=r"--rows names gloo\+sgd twice"):
        cli.rows_of("gloo+sgd, gloo+sgd")


# What is shown.


def test_a_step_has_nccl_tests_bandwidths() -> None:
    found = bench_entry([0.004, 0.002, 0.001], n=4, nbytes=8_000_000, **SAID)
    assert (found.median_ms, found.min_ms, found.spread_ms, found.steps) == pytest.approx((2, 1, 3, 3))
    assert (found.algbw, found.busbw) == pytest.approx((4.0, 6.0))
    assert found.as_json().keys() >= {"row", "n", "shape", "optimizer", "median_ms", "min_ms", "wrong"}


SAID = {"row": "gloo+sgd", "shape": "thousand-flat", "optimizer": "adam", "wrong": 0}


@pytest.mark.parametrize("seconds", [0.0001234, 0.1, 12.0])
def test_a_line_of_the_table_is_as_wide_as_its_head(seconds: float) -> None:
    line = str(bench_entry([seconds], n=2, nbytes=104857600, **SAID))
    assert {len(line)} == {len(part) for part in HEAD.splitlines()}


def test_the_exposed_exchange_is_what_a_step_takes_beyond_computing() -> None:
    ddp, alone = (
        bench_entry([seconds], n=2, nbytes=4, **{**SAID, "row": row})
        for row, seconds in (("ddp-gloo", 0.2), ("train-alone", 0.1))
    )
    found = trained([ddp, alone], samples=16)
    assert [each.exposed_ms for each in found] == pytest.approx([100, 0])
    assert [each.samples_per_s for each in found] == pytest.approx([160, 320])


EACH_KIND = (
    "ddp-gloo,ddp-hub,hub-shm,ring,train-alone,"  # all that trains
    "hub-zmq-bf16,hub-zmq-int8,ring-bf16,ring-gloo-bf16"  # each codec
)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(480)
@pytest.mark.parametrize(("cases", "rows"), [("2:flat:sgd", None), ("2:coded:sgd,2:digits:sgd", EACH_KIND)])
def test_rows_come_out_right_on_real_processes(
    cluster: Cluster, tmp_path: Path, cases: str, rows: str | None
) -> None:
    pytest.importorskip("sklearn")
    out = tmp_path / "bench.json"
    size = ["--megabytes", "10", "--bucket-bytes", str(6 * 2**20)]  # three slices, and two buckets
    short = ["--rounds", "1", "--steps", "2", *(["--rows", rows] if rows else [])]
    words = [*size, *short, "--cases", cases, "--out", str(out)]
    ended = cluster.run("bench", "hubring.workers.programs.ps_worker", "bench", *words)
    assert ended.done(timeout=400) == {"out": str(out), "wrong": 0, "exit_code": 0}
    found = json.loads(out.read_text())
    here = cli.rows_of(rows)
    for shape in [case.shape for case in cli.cases_of(cases)]:
        came = [(each["row"], each["wrong"], each["steps"]) for each in found if each["shape"] == shape]
        assert came == [(row.name, 0, 2) for row in here if takes_part(row, job.find_shape(shape))]

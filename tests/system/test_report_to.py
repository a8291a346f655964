"""`--report-to` brings what rank 0 reports to TensorBoard and to Weights & Biases."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hubring.workers.runtime.metric_export import MetricExport
from tests.support.needs import needs
from tests.support.processes.cluster import MEASURED, SMALL, Cluster

PS_RUN = "hubring.workers.programs.ps_run"
PS_WORKER = "hubring.workers.programs.ps_worker"


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns step and value of each curve, as TensorBoard shows them."""
    events = EventAccumulator(str(folder)).Reload()
    return {
        name: [(point.step, point.value) for point in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


@pytest.mark.slow
def test_ps_run_writes_one_curve_for_each_metric(cluster: Cluster, tmp_path: Path) -> None:
    flags = ["-np", "2", "--report-to", f"tensorboard:{tmp_path / 'runs'}"]
    cluster.run("run", PS_RUN, *flags, MEASURED, "20", "0").wait()
    found = curves(tmp_path / "runs")
    assert [step for step, _ in found["loss"]] == list(range(1, 21)), "from one rank"
    assert found["fit"] == [(20, found["loss"][-1][1])]
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.slow
def test_a_resumed_run_continues_the_curve_at_its_step(cluster: Cluster, tmp_path: Path) -> None:
    flags = ["--checkpoint-dir", str(tmp_path / "saved"), "--report-to", f"tensorboard:{tmp_path / 'runs'}"]
    for steps in ("10", "15"):
        cluster.run(f"to-{steps}", PS_WORKER, *flags, SMALL, steps).done()
    assert [step for step, _ in curves(tmp_path / "runs")["loss"]] == list(range(1, 16))


@pytest.mark.slow
@pytest.mark.full
def test_a_writer_that_fails_is_one_warning(cluster: Cluster, tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    worker = cluster.run("worker", PS_WORKER, "--report-to", f"tensorboard:{file}", SMALL, "5")
    assert worker.done()["steps"] == 5
    assert worker.said().count("training continues without it") == 1


@pytest.mark.slow
@pytest.mark.full
def test_a_script_that_reports_nothing_is_one_warning(cluster: Cluster, tmp_path: Path) -> None:
    (script := tmp_path / "silent.py").write_text("import hubring\nhubring.init()\n")
    worker = cluster.run("worker", PS_WORKER, "--report-to", f"tensorboard:{tmp_path / 'runs'}", str(script))
    worker.done()
    assert worker.said().count("no metric was reported") == 1


def test_samples_become_a_speed(tmp_path: Path) -> None:
    export = MetricExport(f"tensorboard:{tmp_path}")
    for second in range(1, 6):
        export.write(
            second, {"samples": 32, "total_steps": 5, "name": "text", "loss": 0.5}, 32 * second, now=second
        )
    export.close(finished=True)
    found = curves(tmp_path)
    assert found.keys() == {"loss", "samples_per_second"}
    assert found["samples_per_second"] == [(4, 32.0), (5, 32.0)]


def records(file: Path) -> Iterator[bytes]:
    """Reads W&B's file: a log as LevelDB writes it, in blocks of 32 KiB, after 7 bytes."""
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = -at % 32768
        if left and left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps", [pytest.param(5, marks=needs(find_spec("wandb"), "wandb", "pip install wandb"))]
)
def test_weights_and_biases_gets_the_steps(cluster: Cluster, tmp_path: Path, steps: int) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    offline = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    flags = ["--report-to", "wandb:digits"]
    cluster.run("worker", PS_WORKER, *flags, SMALL, str(steps), variables=offline).done()
    [file] = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    read = [Record.FromString(record) for record in records(file)]
    assert {one.run.project for one in read if one.HasField("run")} == {"digits"}
    history = [one.history for one in read if one.HasField("history")]
    assert [one.step.num for one in history] == list(range(1, steps + 1))
    assert all("loss" in {item.key or item.nested_key[0] for item in one.item} for one in history)
    assert [one.exit.exit_code for one in read if one.HasField("exit")] == [0]

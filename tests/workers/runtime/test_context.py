"""What the context tells those it builds."""

from __future__ import annotations

import atexit
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import NonFinite, RingBroken, ServerUnreachable
from hubring.ps.core.timing import Waiting
from hubring.ps.core.trace import Trace
from hubring.ps.job.telemetry import Telemetry
from hubring.ps.observe import logs
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.launchers.placement import Placement
from hubring.workers.runtime import context, topology
from hubring.workers.runtime.progress_line import ProgressLine
from hubring.workers.runtime.training_record import MOST_SAMPLES, FlightRecorder, Record
from hubring.workers.runtime.worker import Worker


def worker(session: Any = None, record: Record | None = None, config: WorkerConfig | None = None) -> Worker:
    """A worker that trains alone, with a session and a record of the test."""
    place = Placement(), LocalCommunicator(), torch.device("cpu")
    return Worker(config or WorkerConfig(), *place, session, record or Record(None), logs.LogOrigin())


@pytest.mark.parametrize(
    ("server", "place"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("hub.example", "the way to hub.example")],
)
def test_a_ring_listens_where_the_server_sees_this_host(
    monkeypatch: pytest.MonkeyPatch, server: str, place: str
) -> None:
    """Its host may have a way to the server and none to anywhere else, as compute nodes do."""

    def asked(*_: Any, host: str, **__: Any) -> None:
        raise RingBroken(host)

    monkeypatch.setattr(topology, "AllreduceCommunicator", asked)
    monkeypatch.setattr(topology, "towards", lambda host: f"the way to {host}")
    session: Any = SimpleNamespace(address=f"{server}:1", sender=SimpleNamespace(rank=0), size=2, board=None)
    with pytest.raises(RingBroken, match=f"^{place}$"):
        topology._ring(WorkerConfig(), session, torch.device("cpu"))


def test_metrics_are_sent_though_the_progress_line_cannot_be_written(tmp_path: Path) -> None:
    one = worker(SimpleNamespace(waiting=Waiting()))
    one.progress_line, one.completed_steps = ProgressLine(tmp_path / "gone" / "line"), 3
    one.record.latest["accuracy"] = 0.5
    assert one._telemetry().metrics == {"accuracy": 0.5}


@pytest.mark.parametrize(("where", "known"), [("cpu", True), ("cuda", False)])
def test_the_wait_for_exchanges_is_told_where_the_host_sees_it(
    tmp_path: Path, where: str, known: bool
) -> None:
    """A work of NCCL is done for the host once it is queued; a hub's also waits for the GPU to compute."""
    file = tmp_path / "record.jsonl"
    alone = worker(record=Record(file))
    alone.report({"loss": 2.0})
    alone.recorder = FlightRecorder(Trace(tmp_path, "worker 0"))
    weight: Any = SimpleNamespace(device=torch.device(where))
    trainer: Any = SimpleNamespace(named_parameters={"weight": weight}, exchange_seconds=1.5)
    alone.adopt(trainer)
    alone.report({"loss": 1.0})
    result = alone.result()
    alone.recorder.close()
    alone.record.close()
    unseen, line = map(json.loads, file.read_text().splitlines())
    assert unseen["hidden_seconds"] is None, "without a recorder"
    for found in (line, result["exchange"]):
        times = found["exposed_seconds"], found["hidden_seconds"]
        assert times == ((1.5, 0.0) if known else (None, None))
    assert result["device"] == where
    assert "emulated" not in result


def test_a_heartbeat_carries_reports_usage_and_the_learning_rate() -> None:
    session: Any = SimpleNamespace(waiting=Waiting())
    alone = worker(session)
    assert session.telemetry().metrics == {}
    groups = [{"lr": 0.25}, {"lr": 0.5}]
    alone.trainers.append(SimpleNamespace(param_groups=groups, exchange_seconds=0.0))
    alone.report({"loss": torch.tensor(0.5), "samples": 32, "total_steps": 40})
    alone.report({"accuracy": 0.75, "samples": 32.0, "note": "text"})
    alone.report({"accuracy": 0.5, "samples": None})
    alone.completed_steps = 10
    sent = session.telemetry()
    assert sent.metrics == {"lr": 0.25, "accuracy": 0.5}
    assert (sent.samples, sent.progress, session.loss) == (64, 0.25, 0.5)
    assert sent.cpu_seconds > 0
    assert sent.memory_bytes > 10 << 20
    groups[0]["lr"] = torch.tensor(0.1)  # type: ignore[assignment]  # Read from a GPU, it would stop the step
    alone.report({"lr": 0.125})
    assert session.telemetry().metrics["lr"] == 0.125, "the script knows better"


@pytest.mark.parametrize("samples", [1e300, 1 << 64])
def test_a_heartbeat_carries_at_most_the_samples_that_it_can(samples: float) -> None:
    record = Record(None)
    for _ in range(2):
        record.report({"samples": samples}, 0.0, None)
    sent = Telemetry(samples=record.samples).to_proto()
    assert sent.samples == MOST_SAMPLES


def test_a_metric_that_stays_nan_makes_parameters_be_looked_at_ever_less_often() -> None:
    alone = worker()
    reports = [*["nan"] * 9, "1.0", "inf"]
    looks: list[bool] = []
    trainer: Any = SimpleNamespace(
        settle=lambda: looks.append(True), named_parameters={}, exchange_seconds=0.0
    )
    alone.trainers.append(trainer)
    counts = []
    for value in reports:
        alone.report({"metric": float(value)})
        counts.append(len(looks))
    assert counts == [1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 5]


def test_only_its_own_parts_are_looked_at_where_parameters_are_divided() -> None:
    """Other ranks may have finite metrics: they would not take part in gathering."""
    alone = worker()
    trainer: Any = SimpleNamespace(shards={"weight": torch.zeros(2)}, exchange_seconds=0.0)
    alone.trainers.append(trainer)
    alone.report({"loss": math.nan})
    trainer.shards["weight"][1] = math.inf
    with pytest.raises(NonFinite, match=r"parameter weight \[2\] holds inf"):
        alone.report({"loss": math.nan})


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_result_is_json_whatever_a_metric_is(value: str) -> None:
    alone = worker()
    alone.report({"loss": float(value), "accuracy": 0.5})
    result = json.loads(json.dumps(alone.result(), allow_nan=False))
    assert result["metrics"] == {"loss": value, "accuracy": 0.5}


def test_a_session_is_left_at_exit_even_if_init_fails_after_it_began(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unheard() -> None:
        raise ServerUnreachable("the server is gone")

    config, place = WorkerConfig(trace=tmp_path), logs.LogOrigin()
    session: Any = SimpleNamespace(clock_offset=unheard)
    joined = worker(session, config=config)
    registered: list[object] = []
    monkeypatch.setattr(context, "_current", None)
    monkeypatch.setattr(context, "_prepared", (config, place, "job"))
    monkeypatch.setattr(context, "_meet", lambda *_: joined)
    monkeypatch.setattr(atexit, "register", registered.append)
    with pytest.raises(ServerUnreachable):
        context.init()
    assert registered == [context._leave_at_exit]
    assert context.started() is joined


def test_the_writer_of_metrics_may_be_slow_after_the_job_knows_that_the_worker_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    class Session:
        """Of a hub that has the worker."""

        waiting, mode, serves, stop_after = Waiting(), "bsp", False, 0

        def leave(self, *_: object) -> None:
            done.append("left")

        def await_end(self) -> None:
            """The job is over."""

        def close(self) -> None:
            done.append("closed")

    one = worker(Session())
    export: Any = SimpleNamespace(close=lambda finished: done.append(f"written {finished}"))
    one.export = export
    monkeypatch.setattr(context, "_current", one)
    context.shutdown()
    assert done == ["left", "closed", "written True"]

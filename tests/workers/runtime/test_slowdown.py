"""What a worker endures, and where in its step; who is lost with a lost worker; hosts without links."""

from __future__ import annotations

import math
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import hubring
from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.observe.logs import LogOrigin
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.compare.plan.setting import Fault, Link, Setting
from hubring.workers.compare.run.runner import ProcessLoss, outlived
from hubring.workers.compare.run.site import hosts
from hubring.workers.runtime import context, slowdown
from hubring.workers.runtime.slowdown import Slowdown, SlowdownSettings, Straggler

Events = list[Any]
Begin = Callable[[SlowdownSettings], Events]


def slept(events: Events) -> float:
    """Seconds, and so the time: it passes in sleep alone."""
    return math.fsum(each for each in events if each != "handed over")


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Makes this process a lone worker; what it sleeps and hands over is noted instead of slept."""
    events: Events = []
    push_pull = LocalCommunicator.push_pull

    def noted(self: LocalCommunicator, bucket: Any, hyper: Any) -> Any:
        events.append("handed over")
        return push_pull(self, bucket, hyper)

    def start(slowness: SlowdownSettings) -> Events:
        file = tmp_path / "hardship.json"
        file.write_bytes(msgspec.json.encode(slowness))
        context.prepare(WorkerConfig(hardship=file), LogOrigin(), "test")
        hubring.init()
        return events

    def timed(slowness: SlowdownSettings, rank: int, waited: Callable[[], float]) -> Slowdown:
        clock = partial(slept, events)
        return Slowdown(slowness, rank, lambda: round(waited()), clock=clock, sleep=events.append)

    monkeypatch.setattr("hubring.workers.runtime.worker.Slowdown", timed)
    monkeypatch.setattr(context, "_result", {})
    monkeypatch.setattr(context, "_prepared", None)
    monkeypatch.setattr(LocalCommunicator, "push_pull", noted)
    yield start
    context.shutdown()


def made(**how: Any) -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hubring.DistributedOptimizer(sgd, model, bucket_bytes=20, **how)


def backward(model: torch.nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def test_gradients_leave_when_the_emulated_device_has_them(begin: Begin) -> None:
    events = begin(SlowdownSettings(compute=0.3))
    model, optimizer = made()
    last, first = 5, 20  # elements of the two layers
    for step in range(3):
        backward(model)
        optimizer.step()
        left = [slept(events[:at]) for at, each in enumerate(events) if each == "handed over"]
        in_pass = 0.1 + 0.2 * last / (last + first) if step else 0.3  # the first pass is only watched
        assert left[0] == pytest.approx(0.3 * step + in_pass)
        assert left[-1] == slept(events) == pytest.approx(0.3 * (step + 1))
        events[:] = [slept(events)]
    assert context.result()["emulated"]["seconds"] == pytest.approx(0.9)


def test_a_machine_that_is_later_than_the_device_does_not_sleep() -> None:
    now, naps = 0.0, list[float]()
    endured = Slowdown(SlowdownSettings(compute=0.3), 0, lambda: 0.0, clock=lambda: now, sleep=naps.append)
    model = torch.nn.Linear(4, 1, bias=False)
    endured.watch(model.parameters())
    for step, (late, nap) in enumerate([(0.1, 0.2), (0.25, 0.05), (0.4, 0.0)]):
        now = float(step)
        endured.begin(step)
        now += late
        naps.clear()
        backward(model)
        assert slept(naps) == pytest.approx(nap)


def test_waiting_for_exchanges_is_no_computing() -> None:
    now, waited, naps = 0.0, 0.0, list[float]()
    endured = Slowdown(SlowdownSettings(compute=0.3), 0, lambda: waited, clock=lambda: now, sleep=naps.append)
    model = torch.nn.Linear(4, 1, bias=False)
    endured.watch(model.parameters())
    endured.begin(0)
    now, waited = 5.1, 5.0  # its parameters came late
    backward(model)
    assert naps == [pytest.approx(0.2)]


def test_a_step_of_several_passes_sleeps_once(begin: Begin) -> None:
    events = begin(SlowdownSettings(compute=0.25))
    model, optimizer = made(backward_passes_per_step=3)
    for _ in range(2):
        for _ in range(3):
            backward(model)
        optimizer.step()
    assert slept(events) == pytest.approx(2 * 0.25)


def test_every_step_has_its_own_delay_at_its_first_gradient(begin: Begin) -> None:
    slowness = SlowdownSettings(Straggler(kind="pareto", seconds=0.02), seed=5)
    events = begin(slowness)
    model, optimizer = made()
    for step in range(4):
        before = len(events)
        backward(model)
        optimizer.step()
        assert events[before:] == [
            slowness.lateness(0, step),
            *["handed over"] * len(optimizer._trained.reducer.buckets),
        ]


def test_delays_are_those_of_the_first_optimizers_steps_however_often_another_steps(begin: Begin) -> None:
    slowness = SlowdownSettings(Straggler(kind="pareto", seconds=0.02), seed=5)
    events = begin(slowness)
    first, other = made(), made()
    for _ in range(3):
        for model, optimizer in (first, other, other):
            backward(model)
            optimizer.step()
    naps = [each for each in events if each != "handed over"]
    assert naps == [slowness.lateness(0, step) for step in range(3)]


def test_a_horovod_script_sleeps_once_a_step_too(begin: Begin) -> None:
    import hubring.horovod as hvd

    events = begin(SlowdownSettings(compute=0.25))
    hvd.init()
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=2
    )
    for _ in range(2):
        backward(model)
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    assert slept(events) == pytest.approx(2 * 0.25)
    hvd.shutdown()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("{", "truncated"),
        ("[1]", "object"),
        ('{"slow": 1}', "slow"),
        ('{"straggler": {"kind": "constant", "seconds": -1}}', "at least 0"),
        ('{"straggler": {"kind": "sometimes", "seconds": 1}}', "sometimes"),
        ('{"compute": "long"}', "compute"),
    ],
)
def test_a_file_that_says_something_else_is_refused_with_an_example(
    tmp_path: Path, text: str | None, words: str
) -> None:
    file = tmp_path / "hardship.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        slowdown.read_slowdown(file)


def test_a_link_that_cannot_be_built_is_refused_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with (
        pytest.raises(UsageError, match=r"the link 200mbit 5ms.*need root.*remove the link"),
        hosts(Setting(workers=2, link=Link(rate=2e8, latency=5e-3))),
    ):
        pass


def test_a_worker_that_never_comes_to_its_step_is_not_lost(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    record.write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(3)))
    watched = threading.Event()
    with subprocess.Popen(["sleep", "600"]) as worker:

        def find() -> int:
            watched.set()
            return worker.pid

        with ProcessLoss(Fault(rank=0, step=6), record, find) as loss:
            assert watched.wait(10.0)
        assert (worker.poll(), loss.step) == (None, None)
        worker.kill()


@pytest.mark.parametrize(
    ("codes", "results", "words"),
    [
        ([69, -9, 0], [{"topology": "hub"}, None, {"topology": "hub"}], "also failed: worker 0"),
        ([1, -9, -6], [None, None, None], "also failed: worker 0, worker 2"),
    ],
)
def test_a_row_says_what_was_lost_with_a_worker(
    codes: list[int], results: list[dict[str, Any] | None], words: str
) -> None:
    assert outlived(codes, results, lost=1) == words

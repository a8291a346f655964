"""What a worker endures, and where in its step; who is lost with a lost worker; hosts without links."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
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
from hubring.workers.compare.experiment.setting import Fault, Link, Setting
from hubring.workers.compare.hardship import network
from hubring.workers.compare.hardship.hosts import hosts, roles_of
from hubring.workers.compare.hardship.loss import Loss, outlived
from hubring.workers.runtime import context
from hubring.workers.slowdown import hardship
from hubring.workers.slowdown.delays import Delays, Slowness
from hubring.workers.slowdown.hardship import Hardship
from hubring.workers.slowdown.straggler import Straggler

Events = list[Any]


def slept(events: Events) -> float:
    """Seconds, and so the time: it passes in sleep alone."""
    return math.fsum(each for each in events if each != "handed over")


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Slowness], Events]]:
    """Makes this process a lone worker; what it sleeps and hands over is noted instead of slept."""
    events: Events = []
    push_pull = LocalCommunicator.push_pull

    def noted(self: LocalCommunicator, bucket: Any, hyper: Any) -> Any:
        events.append("handed over")
        return push_pull(self, bucket, hyper)

    def start(slowness: Slowness) -> Events:
        file = tmp_path / "hardship.json"
        file.write_bytes(msgspec.json.encode(slowness))
        context.prepare(WorkerConfig(hardship=file), LogOrigin(), "test")
        hubring.init()
        return events

    def timed(delays: Delays, waited: Callable[[], float]) -> Hardship:
        return Hardship(delays, lambda: round(waited()), clock=lambda: slept(events), sleep=events.append)

    monkeypatch.setattr("hubring.workers.runtime.worker.Hardship", timed)
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


def test_gradients_leave_when_the_emulated_device_has_them(begin: Callable[[Slowness], Events]) -> None:
    events = begin(Slowness(compute=0.3))
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
    endured = Hardship(Slowness(compute=0.3).of(0), lambda: 0.0, clock=lambda: now, sleep=naps.append)
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
    endured = Hardship(Slowness(compute=0.3).of(0), lambda: waited, clock=lambda: now, sleep=naps.append)
    model = torch.nn.Linear(4, 1, bias=False)
    endured.watch(model.parameters())
    endured.begin(0)
    now, waited = 5.1, 5.0  # its parameters came late
    backward(model)
    assert naps == [pytest.approx(0.2)]


def test_what_the_optimizers_exchanges_took_is_known(begin: Callable[[Slowness], Events]) -> None:
    events = begin(Slowness(compute=0.3))
    model, optimizer = made()
    next(iter(optimizer._reducers)).exchange.seconds += 7.0  # which took no time: so much less was computed
    backward(model)
    assert slept(events) == pytest.approx(7.3)


def test_every_step_sleeps_whoever_is_told_of_its_end(begin: Callable[[Slowness], Events]) -> None:
    events = begin(Slowness(compute=0.3))
    model, optimizer = made(after_step=lambda step: None)
    for _ in range(3):
        backward(model)
        optimizer.step()
    assert slept(events) == pytest.approx(0.9)


def test_a_step_of_several_passes_sleeps_once(begin: Callable[[Slowness], Events]) -> None:
    events = begin(Slowness(compute=0.25))
    model, optimizer = made(backward_passes_per_step=3)
    for _ in range(2):
        for _ in range(3):
            backward(model)
        optimizer.step()
    assert slept(events) == pytest.approx(2 * 0.25)


def test_a_step_of_two_optimizers_sleeps_once(begin: Callable[[Slowness], Events]) -> None:
    events = begin(Slowness(compute=0.25))
    pairs = [made(), made()]
    for _ in range(2):
        for model, optimizer in pairs:
            backward(model)
            optimizer.step()
    assert slept(events) == pytest.approx(2 * 0.25)


def test_every_step_has_its_own_delay_at_its_first_gradient(begin: Callable[[Slowness], Events]) -> None:
    slowness = Slowness(Straggler(kind="pareto", seconds=0.02), seed=5)
    events = begin(slowness)
    model, optimizer = made()
    for step in range(4):
        before = len(events)
        backward(model)
        optimizer.step()
        assert events[before:] == [
            slowness.of(0).lateness(step),
            *["handed over"] * len(optimizer._reducers.buckets),
        ]


def test_delays_are_those_of_the_first_optimizers_steps_however_often_another_steps(
    begin: Callable[[Slowness], Events],
) -> None:
    slowness = Slowness(Straggler(kind="pareto", seconds=0.02), seed=5)
    events = begin(slowness)
    first, other = made(), made()
    for _ in range(3):
        for model, optimizer in (first, other, other):
            backward(model)
            optimizer.step()
    naps = [each for each in events if each != "handed over"]
    assert naps == [slowness.of(0).lateness(step) for step in range(3)]


def test_a_straggler_is_late_by_its_delay_with_all_gradients(begin: Callable[[Slowness], Events]) -> None:
    slowness = Slowness(Straggler(kind="constant", seconds=0.5), compute=0.3)
    events = begin(slowness)
    model, optimizer = made()
    for step in range(2):
        backward(model)
        optimizer.step()
        assert slept(events) == pytest.approx(0.8 * (step + 1))


def test_a_horovod_script_sleeps_once_a_step_too(begin: Callable[[Slowness], Events]) -> None:
    import hubring.horovod as hvd

    events = begin(Slowness(compute=0.25))
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


def test_a_worker_without_hardship_emulates_nothing(tmp_path: Path) -> None:
    context.prepare(WorkerConfig(), LogOrigin(), "test")
    hubring.init()
    try:
        assert "emulated" not in context.result()
    finally:
        context.shutdown()


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
        hardship.read(file)


def test_without_a_link_everybody_is_on_this_machine() -> None:
    with hosts(Setting(workers=2, servers=2)) as here:
        assert here.command("worker 1", ["python", "-V"]) == ["python", "-V"]
        assert here.address("shard 1") == "127.0.0.1"
        assert here.traffic("server") is None


def test_further_shards_and_all_workers_have_hosts_of_their_own() -> None:
    assert roles_of(Setting(workers=2, servers=3)) == ["server", "shard 1", "shard 2", "worker 0", "worker 1"]


def test_a_link_that_cannot_be_built_is_refused_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with (
        pytest.raises(UsageError, match=r"the link 200mbit 5ms.*need root.*remove the link"),
        hosts(Setting(workers=2, link=Link(rate=2e8, latency=5e-3))),
    ):
        pass


def test_a_network_has_an_end() -> None:
    with pytest.raises(UsageError, match="251 hosts"), network.network(251, Link()):
        pass


WRITER = """
import json, sys
with open(sys.argv[1], "w", buffering=1) as record:
    for step in range(int(sys.argv[2])):
        record.write(json.dumps({"step": step, "loss": 1.0}) + "\\n")
sys.stdin.read()
"""


def written(tmp_path: Path, steps: int, fault: Fault, until: Callable[[Loss], None]) -> tuple[Loss, int]:
    """A worker that reports so many steps and then waits to be told to end; its loss, and its exit code."""
    record = tmp_path / "record 0.jsonl"
    command = [sys.executable, "-c", WRITER, str(record), str(steps)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as worker:
        with Loss(fault, record, lambda: worker.pid) as loss:
            until(loss)
        assert worker.stdin is not None
        worker.stdin.close()
    return loss, worker.returncode


def test_a_worker_is_killed_once_its_record_shows_the_step(tmp_path: Path) -> None:
    def until_dead(loss: Loss) -> None:
        loss._thread.join()

    loss, code = written(tmp_path, 10, Fault(rank=0, step=6), until_dead)
    assert code == -signal.SIGKILL
    assert loss.step is not None
    assert 6 <= loss.step < 10


def test_a_worker_that_never_comes_to_its_step_is_not_lost(tmp_path: Path) -> None:
    loss, code = written(tmp_path, 3, Fault(rank=0, step=6), lambda loss: None)
    assert (code, loss.step) == (0, None)


RING = {"topology": "ring", "error": "rank 1 is gone: a ring cannot go on without it"}


@pytest.mark.parametrize(
    ("codes", "results", "words"),
    [
        ([0, -9, 0], [{"topology": "hub"}, None, {"topology": "hub"}], None),
        ([69, -9, 69], [RING, None, RING], "the ring broke"),
        ([69, -9, 0], [{"topology": "hub"}, None, {"topology": "hub"}], "also failed: worker 0"),
        ([1, -9, -6], [None, None, None], "also failed: worker 0, worker 2"),
    ],
)
def test_a_row_says_what_was_lost_with_a_worker(
    codes: list[int], results: list[dict[str, Any] | None], words: str | None
) -> None:
    assert outlived(codes, results, lost=1) == words

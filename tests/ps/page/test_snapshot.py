"""What the page shows of each worker at once, and of a job's progress in bounded space."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from hubring.ps.job.membership import Joiner
from hubring.ps.page.renderer import TICK_SECONDS
from hubring.ps.page.snapshot import LATE_SECONDS, Rates, Snapshot
from hubring.ps.page.status_reader import MOST_SAMPLES, History, ProgressSample
from tests.support.fakes.coordinator import Hub, in_training
from tests.support.pages.status_hub import report, worker


def states(hub: Hub) -> list[str]:
    seen = Snapshot.of(hub.reporter.report([]), Rates(), (), ())
    return [worker.state for worker in seen.workers]


def test_a_stopped_worker_is_seen_within_two_seconds_of_its_last_heartbeat() -> None:
    heartbeat = 1.0
    assert heartbeat + LATE_SECONDS + TICK_SECONDS < 2.0


@pytest.mark.parametrize(("lease", "heartbeat"), [(2.0, 0.4), (5.0, 1.0), (60.0, 1.0)])
async def test_a_worker_is_silent_by_the_heartbeat_interval(lease: float, heartbeat: float) -> None:
    hub, *_ = await in_training(lease=lease)
    hub.time.advance(heartbeat + LATE_SECONDS - 0.01)
    assert states(hub) == ["training", "training"]
    hub.time.advance(0.02)
    assert states(hub) == ["silent", "silent"]


async def test_a_worker_that_waits_for_the_others_is_not_silent() -> None:
    hub = Hub(workers=2, lease=10.0)
    hub.coordinator.job.admit(Joiner("a", "train.py", "hub", "here", 1), hub.time.now())
    hub.time.advance(4.0)
    assert states(hub) == ["joined", "missing"]


async def test_a_worker_that_all_wait_for_does_not_count_as_held_up() -> None:
    hub, first, second = await in_training()
    await hub.beat(first, step=3, waiting=5.0)
    await hub.beat(second, step=3)
    found = states(hub)
    assert (found[first.rank], found[second.rank]) == ("blocked", "training")


async def test_a_worker_that_left_is_shown_with_the_reason() -> None:
    hub = Hub(workers=3, lease=5.0)
    await hub.shard()
    first, second, third = await asyncio.gather(*map(hub.join, "abc"))
    await hub.leave(first)
    hub.time.advance(3.0)
    await hub.beat(third)
    await hub.tick_after(2.5)
    found = states(hub)
    assert [found[each.rank] for each in (first, second, third)] == ["finished", "lost", "silent"]


def test_a_sample_is_the_mean_loss_and_the_sum_of_rates() -> None:
    history = History()
    workers = [worker(0, loss=1.0), worker(1, loss=2.0), worker(2, loss=None)]
    history.note(report(3) | {"workers": workers})
    assert history.samples == (ProgressSample(100.0, 40, 1.5, 6.0),)


def test_metrics_are_the_mean_over_those_who_report_them() -> None:
    history = History()
    speeds = {"samples_per_second": 32.0}
    workers = [worker(0, metrics={"lr": 0.5, "accuracy": 0.25}, **speeds), worker(1, metrics={"lr": 0.25})]
    history.note(report(2) | {"workers": workers})
    (found,) = history.samples
    assert (found.samples_rate, found.metrics) == (32.0, (("accuracy", 0.25), ("lr", 0.375)))


def test_a_long_job_keeps_its_beginning_and_no_more_samples_than_a_short_one() -> None:
    history = History()
    for second in range(5000):
        history.note(report(1, seconds_up=float(second), step=1 + second))
        assert len(history.samples) <= MOST_SAMPLES
    times = [each.seconds for each in history.samples]
    assert times[0] == 0.0
    assert times[-1] >= 4900
    assert len(times) > MOST_SAMPLES // 2
    assert len({after - before for before, after in pairwise(times)}) <= 2


def test_samples_are_not_taken_more_often_than_due() -> None:
    history = History()
    for quarter in range(8):
        history.note(report(1, seconds_up=quarter / 4))
    assert [each.seconds for each in history.samples] == [0.0, 1.0]


def test_a_job_that_resumes_is_sampled_from_its_first_step_on() -> None:
    history = History()
    for second, step in enumerate((0, 0, 5001)):
        workers = [worker(0, loss=1.0 if step else None)]
        history.note(report(1, seconds_up=float(second), step=step, workers=workers))
    assert [each.step for each in history.samples] == [5001]


def test_the_last_jobs_course_stays_until_another_begins() -> None:
    history = History()
    history.note(report(1))
    history.note(report(0, job="", started=False))
    assert len(history.samples) == 1
    history.note(report(1, started=False, state="waiting"))
    assert list(history.samples) == []
    history.note(report(1, seconds_up=200.0))
    assert [each.seconds for each in history.samples] == [200.0]

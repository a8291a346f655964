"""The course of a job is kept in bounded space, whatever its length."""

from __future__ import annotations

from itertools import pairwise

from hubring.ps.page.history import MOST, History, Sample
from tests.support.pages.status_hub import report, worker


def test_a_sample_is_the_mean_loss_and_the_sum_of_rates() -> None:
    history = History()
    workers = [worker(0, loss=1.0), worker(1, loss=2.0), worker(2, loss=None)]
    history.note(report(3) | {"workers": workers})
    assert history.samples == (Sample(100.0, 40, 1.5, 6.0),)


def test_metrics_are_the_mean_over_those_who_report_them() -> None:
    history = History()
    speeds = {"samples_per_second": 32.0}
    workers = [worker(0, metrics={"lr": 0.5, "accuracy": 0.25}, **speeds), worker(1, metrics={"lr": 0.25})]
    history.note(report(2) | {"workers": workers})
    (found,) = history.samples
    assert (found.samples_rate, found.metrics) == (32.0, (("accuracy", 0.25), ("lr", 0.375)))


def test_without_a_finite_loss_there_is_none() -> None:
    history = History()
    history.note(report(1) | {"workers": [worker(0, loss=None)]})
    assert history.samples[0].loss is None


def test_a_long_job_keeps_its_beginning_and_no_more_samples_than_a_short_one() -> None:
    history = History()
    for second in range(5000):
        history.note(report(1, seconds_up=float(second), step=second))
        assert len(history.samples) <= MOST
    times = [each.seconds for each in history.samples]
    assert times[0] == 0.0
    assert times[-1] >= 4900
    assert len(times) > MOST // 2
    assert len({after - before for before, after in pairwise(times)}) <= 2


def test_samples_are_not_taken_more_often_than_due() -> None:
    history = History()
    for quarter in range(8):
        history.note(report(1, seconds_up=quarter / 4))
    assert [each.seconds for each in history.samples] == [0.0, 1.0]


def test_the_last_jobs_course_stays_until_another_begins() -> None:
    history = History()
    history.note(report(1))
    history.note(report(0, job="", started=False))
    assert len(history.samples) == 1
    history.note(report(1, started=False, state="waiting"))
    assert list(history.samples) == []
    history.note(report(1, seconds_up=200.0))
    assert [each.seconds for each in history.samples] == [200.0]


def test_nothing_is_sampled_before_the_start_nor_when_all_have_left() -> None:
    history = History()
    history.note(report(1, started=False))
    history.note(report(0))
    assert history.samples == ()

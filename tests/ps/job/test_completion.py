"""The time that a job still needs follows from how fast its reported progress rises."""

from __future__ import annotations

import pytest

from hubring.ps.job.completion import MOST_READINGS, Completion


def test_a_steady_job_ends_when_its_speed_says() -> None:
    completion = Completion()
    for second in range(11):
        completion.note(second / 100, float(second))
    assert completion.part == 0.1
    assert completion.seconds_left(10.0) == pytest.approx(90.0)
    assert completion.seconds_left(15.0) == pytest.approx(85.0)


def test_without_two_different_readings_the_time_is_unknown() -> None:
    completion = Completion()
    assert (completion.part, completion.seconds_left(0.0)) == (None, None)
    for second in range(5):
        completion.note(0.5, float(second))
    assert (completion.part, completion.seconds_left(5.0)) == (0.5, None)


def test_progress_that_rises_once_per_epoch_is_enough() -> None:
    completion = Completion()
    for second in range(300):
        completion.note(second // 100 / 10, float(second))
    assert completion.seconds_left(299.0) == pytest.approx(800.0 - 99.0)


def test_the_recent_speed_counts() -> None:
    completion = Completion()
    part, now = 0.0, 0.0
    for step in (0.001,) * 200 + (0.0001,) * (MOST_READINGS + 1):
        part, now = part + step, now + 1.0
        completion.note(part, now)
    assert completion.seconds_left(now) == pytest.approx((1 - part) / 0.0001, rel=0.01)


def test_progress_that_falls_starts_over_and_a_job_that_reports_none_has_none() -> None:
    completion = Completion()
    for second in range(10):
        completion.note(second / 10, float(second))
    completion.note(0.0, 10.0)
    assert completion.seconds_left(10.0) is None
    completion.note(0.5, 11.0)
    assert completion.seconds_left(11.0) == pytest.approx(1.0)
    completion.note(None, 12.0)
    assert (completion.part, completion.seconds_left(12.0)) == (None, None)


def test_a_finished_job_needs_no_more_time() -> None:
    completion = Completion()
    completion.note(1.0, 0.0)
    assert completion.seconds_left(5.0) == 0.0

"""A rate is that of the last seconds, and no leap is taken for one."""

from __future__ import annotations

from hubring.ps.job.step_rate import WINDOW_SECONDS, StepRate


def test_it_is_steps_a_second_lately() -> None:
    rate = StepRate()
    for second in range(20):
        rate.note(10 * second, float(second))
    assert rate.rate == 10.0
    for second in range(20, 40):
        rate.note(200 + 2 * (second - 20), float(second))
    assert rate.rate == 2.0


def test_a_job_that_resumes_does_not_leap() -> None:
    rate = StepRate()
    rate.note(0, 0.0)
    rate.note(0, WINDOW_SECONDS)
    rate.note(10_000, 2 * WINDOW_SECONDS)
    assert rate.rate == 0.0
    rate.note(10_030, 3 * WINDOW_SECONDS)
    assert rate.rate == 30 / WINDOW_SECONDS


def test_what_begins_anew_does_not_run_backwards() -> None:
    rate = StepRate()
    rate.note(10_000, 0.0)
    rate.note(20_000, WINDOW_SECONDS)
    rate.note(0, 2 * WINDOW_SECONDS)
    assert rate.rate == 0.0
    rate.note(30, 3 * WINDOW_SECONDS)
    rate.note(60, 4 * WINDOW_SECONDS)
    assert rate.rate == 30 / WINDOW_SECONDS

"""A pace is that of the last seconds, and no leap is taken for one."""

from __future__ import annotations

from hubring.ps.job.step_rate import LATELY, Pace


def test_it_is_steps_a_second_lately() -> None:
    pace = Pace()
    for second in range(20):
        pace.note(10 * second, float(second))
    assert pace.rate == 10.0
    for second in range(20, 40):
        pace.note(200 + 2 * (second - 20), float(second))
    assert pace.rate == 2.0


def test_a_job_that_resumes_does_not_leap() -> None:
    pace = Pace()
    pace.note(0, 0.0)
    pace.note(0, LATELY)
    pace.note(10_000, 2 * LATELY)
    assert pace.rate == 0.0
    pace.note(10_030, 3 * LATELY)
    assert pace.rate == 30 / LATELY


def test_what_begins_anew_does_not_run_backwards() -> None:
    pace = Pace()
    pace.note(10_000, 0.0)
    pace.note(20_000, LATELY)
    pace.note(0, 2 * LATELY)
    assert pace.rate == 0.0
    pace.note(30, 3 * LATELY)
    pace.note(60, 4 * LATELY)
    assert pace.rate == 30 / LATELY

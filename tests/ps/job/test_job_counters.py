from __future__ import annotations

from hubring.ps.job.job_counters import JobCounters
from hubring.ps.job.outcome import Outcome

NOBODY = {"finished": 0, "preempted": 0, "failed": 0, "lost": 0}


def test_a_job_counts_by_its_result() -> None:
    counters = JobCounters()
    counters.close(Outcome(finished=[0, 1]))
    counters.close(Outcome(preempted=[0, 1]))
    counters.close(Outcome(failed={0: "a bug"}))
    counters.close(Outcome(finished=[0], broke=True))
    assert counters.counts(Outcome())["jobs"] == {"finished": 1, "preempted": 1, "failed": 2}


def test_who_left_the_job_that_runs_counts_at_once_and_once() -> None:
    counters, running = JobCounters(), Outcome()
    running.leave("finished", 0)
    running.leave("lost", 1, "silent for 5.0 s at step 3")
    counts = {**NOBODY, "finished": 1, "lost": 1}
    assert counters.counts(running)["workers"] == counts
    counters.close(running)
    assert counters.counts(running)["workers"] == counts
    assert counters.counts(Outcome())["workers"] == counts


def test_a_start_that_came_to_nothing_is_no_job() -> None:
    counters, started = JobCounters(), Outcome()
    started.leave("lost", 0, "silent for 5.0 s at step 0")
    counters.leave(started)
    assert counters.counts(Outcome()) == {
        "jobs": {"finished": 0, "preempted": 0, "failed": 0},
        "workers": {**NOBODY, "lost": 1},
        "refused": {},
    }


def test_a_place_that_was_lost_twice_counts_twice() -> None:
    counters, running = JobCounters(), Outcome()
    for step in (3, 8):
        running.leave("lost", 1, f"silent for 5.0 s at step {step}")
    assert running.lost == {1: "silent for 5.0 s at step 8"}
    assert counters.counts(running)["workers"] == {**NOBODY, "lost": 2}

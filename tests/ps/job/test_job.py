from __future__ import annotations

import pytest

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import Member, Sender
from hubring.ps.job.job import Job
from hubring.ps.job.membership import Joiner
from hubring.ps.job.outcome import JobCounters, JobOutcome, LeaveReason


def joiner(token: str, **changes: object) -> Joiner:
    settings = {"job": "train.py", "topology": "hub", "host": "here", "pid": 1, **changes}
    return Joiner(token=token, **settings)  # type: ignore[arg-type]


def job(workers: int | None = 2, keep_going: bool = True) -> Job:
    return Job(workers=workers, lease_seconds=5.0, keep_going=keep_going)


def sender(member: Member) -> Sender:
    return Sender(member.rank, member.incarnation)


def full(keep_going: bool = True, topology: str = "hub") -> tuple[Job, list[Sender]]:
    started = job(keep_going=keep_going)
    members = [started.admit(joiner(token, topology=topology), 0.0) for token in "ab"]
    started.exchanged = True
    return started, [sender(member) for member in members]


def test_the_world_is_as_large_as_the_first_launcher_says_or_one() -> None:
    for given, expected in ((3, 3), (None, 1)):
        begun = job(workers=None)
        begun.admit(joiner("a", world_size=given), 0.0)
        assert begun.membership is not None
        assert begun.membership.world_size == expected


def test_workers_of_one_job_all_have_local_or_none() -> None:
    begun = job()
    begun.admit(joiner("a", local=True), 0.0)
    with pytest.raises(ConfigError, match="hub, but the job uses --topology hub --local; start all"):
        begun.admit(joiner("b"), 0.0)


@pytest.mark.parametrize("lockstep", [True, False])
def test_a_worker_whose_step_was_refused_ends_a_job_in_lockstep(lockstep: bool) -> None:
    running = Job(workers=2, lease_seconds=5.0, keep_going=True, lockstep=lockstep)
    first, _ = [sender(running.admit(joiner(token), 0.0)) for token in "ab"]
    running.leave(first, LeaveReason.REFUSED, "zero_grad() after backward", 3)
    assert isinstance(running.failure, ConfigError) == lockstep
    assert running.outcome.failed == {0: "zero_grad() after backward"}


def test_a_time_in_which_nobody_could_be_heard_counts_against_nobody() -> None:
    running, (first, second) = full()
    running.extend_leases(6.0, 10.0)
    assert running.expire(10.0) == []
    running.beat(first, 7, 0.5, 10.0)
    assert [member.rank for member in running.expire(12.0)] == [second.rank]


def test_extended_leases_never_exceed_one_lease_after_the_last_heartbeat() -> None:
    running, (first, second) = full()
    for sender in (first, second):
        running.beat(sender, 7, 0.5, 3600.0)
    running.extend_leases(3600.0, 3600.0)
    assert len(running.expire(3605.1)) == 2


def test_of_workers_in_lockstep_the_slowest_is_the_one_that_does_not_wait() -> None:
    running, (first, second) = full()
    running.beat(first, 7, 0.5, 1.0, waiting=9.5)
    running.beat(second, 7, 0.5, 1.0)
    assert "rank 1" in running.slowest()
    running.beat(second, 7, 0.5, 2.0, waiting=9.0)
    assert running.slowest() == ""


def test_the_others_hear_of_one_that_was_asked_to_stop() -> None:
    running, (first, second) = full()
    running.leave(second, LeaveReason.PREEMPTED, "", 9)
    (line,) = running.beat(first, 10, 0.5, 1.0)
    assert "rank 1" in line
    assert "stopped on request; the job continues with 1 of 2 workers" in line


def test_a_job_that_cannot_go_on_after_an_error_in_the_script_says_to_fix_that_first() -> None:
    running, (_, second) = full(keep_going=False)
    running.leave(second, LeaveReason.FAILED, "ValueError: odd", 9)
    assert "failed: ValueError: odd; with --on-loss wait" in str(running.failure)
    assert "Fix that error, then restart the job; it continues" in str(running.failure)


def test_a_ring_stops_once_every_member_knows_after_which_step() -> None:
    begun, (first, second) = full(topology="ring")
    assert not begun.stop(first, 0)
    assert not begun.stop(first, 8)
    assert (begun.stop_after, begun.draining) == (8, True)
    assert not begun.stop(second, 0)
    assert not begun.stop(second, 9)
    assert begun.stop_after == 8, "the first to name a step decides"
    assert begun.stop(second, 8)


@pytest.mark.parametrize(("step", "heard"), [(12, 1), (9, 0)])
def test_a_rank_that_ends_before_its_next_heartbeat_hears_of_it_as_it_leaves(step: int, heard: int) -> None:
    running, (first, second) = full()
    running.leave(first, LeaveReason.FINISHED, "", 9)
    assert running.beat(second, 9, 0.5, 1.0) == []
    news = running.leave(second, LeaveReason.FINISHED, "", step)
    assert ["rank 0 (here pid 1) finished after 9 steps" in line for line in news] == [True] * heard


def test_without_lockstep_ranks_may_take_any_number_of_steps() -> None:
    running = Job(workers=2, lease_seconds=5.0, keep_going=True, lockstep=False)
    first, second = [sender(running.admit(joiner(token), 0.0)) for token in "ab"]
    running.leave(first, LeaveReason.FINISHED, "", 9)
    assert running.beat(second, 20, 0.5, 1.0) == []
    assert running.finished(second) == ""
    assert running.membership is not None
    assert running.membership.view.finished == ""


def test_a_rank_that_can_take_no_step_gets_the_rank_that_finished() -> None:
    running, (first, second) = full(topology="ring")
    running.beat(second, 8, 0.5, 1.0)
    running.leave(first, LeaveReason.FINISHED, "", 9)
    assert running.finished(second) == "", "its step 9 is under way"
    running.beat(second, 9, 0.5, 1.0)
    text = running.finished(second)
    assert "rank 0 (here pid 1) finished after 9 steps, so no rank can take step 10" in text
    assert "optimizer.join()" in text
    assert running.membership is not None
    assert running.membership.view.finished == text


def test_a_job_counts_by_its_result() -> None:
    counters = JobCounters()
    counters.close(JobOutcome(finished=[0, 1]))
    counters.close(JobOutcome(preempted=[0, 1]))
    counters.close(JobOutcome(failed={0: "a bug"}))
    counters.close(JobOutcome(finished=[0], broke=True))
    assert counters.counts(JobOutcome())["jobs"] == {"finished": 1, "preempted": 1, "failed": 2}


def test_workers_of_a_start_that_came_to_nothing_count_without_a_job() -> None:
    counters, started = JobCounters(), JobOutcome()
    for step in (3, 8):  # a place that is lost twice counts twice
        started.leave("lost", 1, f"silent for 5.0 s at step {step}")
    assert started.lost == {1: "silent for 5.0 s at step 8"}
    counted = {
        "jobs": {"finished": 0, "preempted": 0, "failed": 0},
        "workers": {"finished": 0, "preempted": 0, "failed": 0, "lost": 2},
        "refused": {},
    }
    assert counters.counts(started) == counted
    counters.leave(started)
    assert counters.counts(JobOutcome()) == counted

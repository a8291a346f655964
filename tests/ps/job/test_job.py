from __future__ import annotations

import pytest

from hubring.ps.core.errors import ConfigError, Fenced, JobFailed, NonFinite
from hubring.ps.core.types import Member, Sender
from hubring.ps.job.job import Job, Reason
from hubring.ps.job.joiner import Joiner


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
    return started, [sender(member) for member in members]


def test_a_job_starts_when_all_places_are_taken() -> None:
    begun = job()
    begun.admit(joiner("a"), 0.0)
    assert not begun.started
    assert "1 of 2 workers (rank 1 not started yet)" in begun.waiting_for()
    begun.admit(joiner("b"), 1.0)
    assert begun.started


def test_the_world_is_as_large_as_the_first_launcher_says_or_one() -> None:
    for given, expected in ((3, 3), (None, 1)):
        begun = job(workers=None)
        begun.admit(joiner("a", world_size=given), 0.0)
        assert begun.membership is not None
        assert begun.membership.world_size == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"job": "other.py"}, "'other.py'"),
        ({"topology": "ring"}, "--topology hub"),
        ({"world_size": 3}, "--workers 3"),
    ],
)
def test_a_stranger_is_refused_with_both_sides_named(changes: dict[str, object], words: str) -> None:
    begun = job()
    begun.admit(joiner("a"), 0.0)
    with pytest.raises(ConfigError, match=words):
        begun.admit(joiner("b", **changes), 0.0)


@pytest.mark.parametrize("topology", ["hub", "ring"])
def test_a_worker_that_diverged_ends_the_job_for_all(topology: str) -> None:
    running, (first, second) = full(topology=topology)
    running.leave(first, Reason.DIVERGED, "the gradient of rank 0 is not finite", 3)
    running.leave(second, Reason.DIVERGED, "the same, heard later", 3)
    assert isinstance(running.failure, NonFinite)
    assert str(running.failure) == "the gradient of rank 0 is not finite"
    assert list(running.outcome.failed) == [0, 1]


def test_survivors_hear_once_of_a_lost_worker() -> None:
    running, (first, second) = full()
    running.beat(first, 7, 0.5, 4.0)
    assert [member.rank for member in running.expire(6.0)] == [1]
    news = running.beat(first, 8, 0.5, 6.5)
    assert len(news) == 1
    assert "rank 1" in news[0]
    assert "the job continues with 1 of 2 workers" in news[0]
    assert running.beat(first, 9, 0.5, 7.0) == []
    with pytest.raises(Fenced):
        running.beat(second, 7, 0.5, 7.0)
    assert list(running.outcome.lost) == [1]
    assert running.failure is None


def test_a_time_in_which_nobody_could_be_heard_counts_against_nobody() -> None:
    running, (first, second) = full()
    running.excuse(6.0, 10.0)
    assert running.expire(10.0) == []
    running.beat(first, 7, 0.5, 10.0)
    assert [member.rank for member in running.expire(12.0)] == [second.rank]


def test_who_was_heard_since_gets_no_more_than_a_lease() -> None:
    running, (first, second) = full()
    for sender in (first, second):
        running.beat(sender, 7, 0.5, 3600.0)
    running.excuse(3600.0, 3600.0)
    assert len(running.expire(3605.1)) == 2


@pytest.mark.parametrize(("keep_going", "topology"), [(False, "hub"), (True, "ring")])
def test_a_loss_that_cannot_be_borne_fails_the_job(keep_going: bool, topology: str) -> None:
    running, (first, _) = full(keep_going, topology)
    running.beat(first, 7, 0.5, 4.0)
    running.expire(6.0)
    assert isinstance(running.failure, JobFailed)
    assert "rank 1" in str(running.failure)
    with pytest.raises(JobFailed):
        running.admit(joiner("c"), 7.0)


def test_the_job_is_over_when_the_last_worker_left() -> None:
    running, (first, second) = full()
    running.leave(first, Reason.FINISHED, "", 9)
    over_before = running.over
    running.leave(second, Reason.FAILED, "boom", 9)
    assert (over_before, running.over) == (False, True)
    assert running.outcome.finished == [0]
    assert running.outcome.failed == {1: "boom"}
    assert running.outcome.ok


def test_leaving_twice_counts_once() -> None:
    running, (first, _) = full()
    running.leave(first, Reason.FINISHED, "", 9)
    running.leave(first, Reason.FINISHED, "", 9)
    assert running.outcome.finished == [0]


def test_the_slowest_worker_is_named() -> None:
    running, (first, second) = full()
    running.beat(first, 7, 0.5, 1.0)
    running.beat(second, 3, 0.5, 1.0)
    assert "rank 1" in running.slowest()
    assert "step 3" in running.slowest()


def test_of_workers_in_lockstep_the_slowest_is_the_one_that_does_not_wait() -> None:
    running, (first, second) = full()
    running.beat(first, 7, 0.5, 1.0, waiting=9.5)
    running.beat(second, 7, 0.5, 1.0)
    assert "rank 1" in running.slowest()
    running.beat(second, 7, 0.5, 2.0, waiting=9.0)
    assert running.slowest() == ""


def test_a_ring_that_has_begun_takes_nobody_in() -> None:
    running, (first, _) = full(topology="ring")
    running.leave(first, Reason.FINISHED, "", 9)
    with pytest.raises(ConfigError, match="no worker can join a ring"):
        running.admit(joiner("c", topology="ring"), 1.0)
    assert running.admit(joiner("b", topology="ring"), 1.0).rank == 1


def test_nobody_is_waited_for_before_anybody_came() -> None:
    assert job().waiting_for() == "waiting for the first worker"
    assert not job().over


def test_the_others_hear_of_one_who_was_asked_to_stop() -> None:
    running, (first, second) = full()
    running.leave(second, Reason.PREEMPTED, "", 9)
    (line,) = running.beat(first, 10, 0.5, 1.0)
    assert "rank 1" in line
    assert "stopped on request; the job continues with 1 of 2 workers" in line


def test_nobody_hears_of_those_who_leave_when_all_are_asked_to() -> None:
    running, (first, second) = full()
    running.draining = True
    running.leave(second, Reason.PREEMPTED, "", 9)
    assert running.leave(first, Reason.PREEMPTED, "", 9) == []
    assert running.outcome.preempted == [1, 0]


def test_a_ring_stops_once_every_member_knows_after_which_step() -> None:
    begun, (first, second) = full(topology="ring")
    assert not begun.stop(first, 0)
    assert not begun.stop(first, 8)
    assert (begun.stop_after, begun.draining) == (8, True)
    assert not begun.stop(second, 0)
    assert begun.stop(second, 8)


def test_the_first_to_say_when_a_ring_stops_decides() -> None:
    begun, (first, second) = full(topology="ring")
    begun.stop(second, 8)
    assert not begun.stop(first, 9)
    assert begun.stop_after == 8
    assert begun.stop(first, 8)


def test_members_of_a_ring_that_stops_leave_without_breaking_it() -> None:
    begun, (first, second) = full(keep_going=False, topology="ring")
    for member in (first, second):
        begun.stop(member, 8)
    for member in (first, second):
        assert begun.leave(member, Reason.PREEMPTED, "", 8) == []
    assert begun.failure is None
    assert begun.outcome.was_preempted


def test_the_others_hear_once_that_they_step_without_one_that_finished(
    caplog: pytest.LogCaptureFixture,
) -> None:
    running, (first, second) = full()
    running.leave(first, Reason.FINISHED, "", 9)
    assert running.beat(second, 9, 0.5, 1.0) == []
    (news,) = running.beat(second, 10, 0.5, 2.0)
    assert "rank 0 (here pid 1) finished after 9 steps; the other ranks go on without it" in news
    assert "uneven=True" in news
    assert [record.message for record in caplog.records if "go on" in record.message] == [news]
    assert running.beat(second, 11, 0.5, 3.0) == []
    assert running.leave(second, Reason.FINISHED, "", 12) == []


def test_a_rank_that_ends_before_its_next_heartbeat_hears_of_it_as_it_leaves() -> None:
    running, (first, second) = full()
    running.leave(first, Reason.FINISHED, "", 9)
    (news,) = running.leave(second, Reason.FINISHED, "", 12)
    assert "rank 0 (here pid 1) finished after 9 steps" in news


def test_ranks_that_finish_after_the_same_step_hear_nothing() -> None:
    running, (first, second) = full()
    running.leave(first, Reason.FINISHED, "", 9)
    assert running.beat(second, 9, 0.5, 1.0) == []
    assert running.leave(second, Reason.FINISHED, "", 9) == []


def test_without_lockstep_ranks_may_take_any_number_of_steps() -> None:
    running = Job(workers=2, lease_seconds=5.0, keep_going=True, lockstep=False)
    first, second = [sender(running.admit(joiner(token), 0.0)) for token in "ab"]
    running.leave(first, Reason.FINISHED, "", 9)
    assert running.beat(second, 20, 0.5, 1.0) == []
    assert running.finished(second) == ""
    assert running.membership is not None
    assert running.membership.view.finished == ""


def test_who_can_take_no_other_step_is_told_whose_batches_ended() -> None:
    running, (first, second) = full(topology="ring")
    running.beat(second, 8, 0.5, 1.0)
    running.leave(first, Reason.FINISHED, "", 9)
    assert running.finished(second) == "", "its step 9 is under way"
    running.beat(second, 9, 0.5, 1.0)
    text = running.finished(second)
    assert "rank 0 (here pid 1) finished after 9 steps, so no rank can take step 10" in text
    assert "optimizer.join()" in text
    assert running.membership is not None
    assert running.membership.view.finished == text

"""Places, leases and epochs."""

from __future__ import annotations

import pytest

from hubring.ps.core.errors import ConfigError, Fenced
from hubring.ps.core.types import Member, Sender
from hubring.ps.job.membership import (
    JOIN_SECONDS,
    MOST_DEPARTED,
    RETRY_SECONDS,
    RETURN_SECONDS,
    Membership,
    answer_seconds,
    heartbeat_seconds,
)


def join(members: Membership, token: str, rank: int | None = None, now: float = 0.0) -> Member:
    return members.join(token, rank, host="alpha", pid=len(token), now=now)


def sender(member: Member) -> Sender:
    return Sender(member.rank, member.incarnation)


def full(world_size: int = 2, lease: float = 10.0) -> tuple[Membership, list[Member]]:
    members = Membership(world_size, lease)
    return members, [join(members, f"token{rank}") for rank in range(world_size)]


@pytest.mark.parametrize("lease", [1.0, 2.0, 10.0, 90.0, 3600.0])
def test_a_lost_heartbeat_and_a_new_connection_fit_in_a_lease(lease: float) -> None:
    assert heartbeat_seconds(lease) + answer_seconds(lease) + 2 * RETRY_SECONDS < lease


def test_the_view_begins_once_all_places_are_held() -> None:
    members = Membership(2, 10.0)
    first = join(members, "a")
    assert (members.view.epoch, members.view.members, members.missing()) == (0, (), [1])
    assert members.members == (first,)
    second = join(members, "b")
    assert members.complete
    assert members.view.epoch == 1
    assert members.view.members == (first, second)


def test_a_repeated_token_is_the_same_member_with_a_new_lease() -> None:
    members, (first, _) = full()
    assert join(members, "token0", now=9.0) == first
    assert [lost.rank for lost in members.expire(15.0)] == [1]


def test_joiners_get_the_lowest_free_rank_beside_those_that_were_asked_for() -> None:
    members = Membership(3, 10.0)
    assert [join(members, "a", 1).rank, join(members, "b").rank, join(members, "c").rank] == [1, 0, 2]


def test_every_join_has_a_higher_incarnation_also_after_a_restore() -> None:
    members = Membership(2, 10.0, first_incarnation=40)
    first, second = join(members, "a"), join(members, "b")
    members.leave(sender(second))
    third = join(members, "c")
    assert [each.incarnation >> 128 for each in (first, second, third)] == [40, 41, 42]
    assert members.next_incarnation == 43


def test_a_full_house_names_its_holders() -> None:
    members, _ = full()
    with pytest.raises(ConfigError, match=r"rank 0 \(alpha pid 6\), rank 1 \(alpha pid 6\).*--workers 3"):
        join(members, "late")


@pytest.mark.parametrize(
    ("rank", "named"), [(2, "ranks 0 to 1.*--workers 3"), (-1, "rank -1"), (0, "rank 0 .alpha")]
)
def test_a_place_that_cannot_be_had_is_named(rank: int, named: str) -> None:
    members = Membership(2, 10.0)
    join(members, "a", 0)
    with pytest.raises(ConfigError, match=named):
        join(members, "b", rank)
    assert members.next_incarnation == 2


def test_a_lease_runs_out_only_after_its_time_and_raises_the_epoch_once() -> None:
    members, (first, second, third) = full(3)
    assert members.expire(10.0) == []
    members.beat(sender(third), now=10.0)
    assert members.expire(10.5) == [first, second]
    assert members.view.epoch == 2
    assert members.view.ranks == (2,)
    assert members.complete


def test_who_disconnects_is_lost_soon_unless_it_is_heard_of() -> None:
    members, (first, second, third) = full(3)
    members.beat(sender(third), now=1.0)
    for one in (first, second):
        members.disconnect(sender(one), now=1.0)
    members.beat(sender(second), now=2.0)
    assert members.expire(1.0 + RETURN_SECONDS) == []
    assert members.expire(1.5 + RETURN_SECONDS) == [first]
    with pytest.raises(Fenced, match=r"its connection closed, and it sent no heartbeat for 5\.5 s"):
        members.beat(sender(first), now=9.0)
    members.disconnect(sender(first), now=9.0)
    assert members.expire(10.0) == []


def test_a_held_up_server_gives_more_time_to_who_disconnected() -> None:
    members, (first, _) = full()
    members.disconnect(sender(first), now=0.0)
    members.excuse(3.0, now=3.0)
    assert members.expire(2.5 + RETURN_SECONDS) == []
    assert members.expire(3.5 + RETURN_SECONDS) == [first]


def test_who_lost_its_place_is_told_since_when_and_why_and_who_holds_it() -> None:
    members, (first, second) = full()
    members.beat(sender(second), now=12.0)
    members.expire(12.5)
    with pytest.raises(Fenced, match=r"rank 0 .*no heartbeat for 12.5 s \(lease: 10 s\).*rejoin"):
        members.beat(sender(first), now=13.0)
    members.join("new", None, "beta", 77, now=13.0)
    with pytest.raises(Fenced, match=r"rank 0 \(beta pid 77\) holds the rank now"):
        members.beat(sender(first), now=13.0)


def test_a_token_whose_place_was_lost_cannot_come_back_as_a_ghost() -> None:
    members, (first, _) = full()
    members.leave(sender(first))
    with pytest.raises(Fenced, match="it left the job"):
        join(members, "token0")
    assert members.missing() == [0]


def test_leaving_twice_or_for_another_life_changes_nothing() -> None:
    members, (first, _) = full()
    assert members.leave(sender(first)) == first
    assert members.leave(sender(first)) is None
    successor = join(members, "new")
    assert members.leave(sender(first)) is None
    assert members.member(sender(successor)) == successor


def test_a_late_joiner_counts_once_it_is_activated() -> None:
    members, (first, second) = full()
    members.leave(sender(first))
    epoch = members.view.epoch
    late = join(members, "new")
    assert members.view.members == (second,)
    members.activate(sender(late))
    members.activate(sender(late))
    assert members.view.ranks == (late.rank, second.rank)
    assert members.view.epoch == epoch + 1


def test_losing_somebody_inactive_does_not_raise_the_epoch() -> None:
    members = Membership(2, 10.0)
    lost = join(members, "a")
    assert members.expire(11.0) == [lost]
    assert members.view.epoch == 0
    assert members.missing() == [0, 1]
    assert not members.complete


def test_a_sender_from_another_server_is_fenced() -> None:
    members, _ = full()
    with pytest.raises(
        Fenced, match=r"rank 1 is not a member of the job: this server did not admit it, or has restarted"
    ):
        members.beat(Sender(1, 99), now=0.0)
    with pytest.raises(Fenced):
        members.activate(Sender(5, 1))


def test_a_job_that_often_replaces_workers_does_not_grow() -> None:
    members = Membership(1, 10.0)
    for index in range(MOST_DEPARTED + 50):
        members.leave(sender(join(members, f"token{index}")))
    assert len(members.departed) == len(members._tokens) == MOST_DEPARTED + 1
    assert not members.holds("token0")
    assert members.holds(f"token{MOST_DEPARTED + 49}")


def test_each_worker_of_a_large_job_that_finished_can_ask_again() -> None:
    members, everyone = full(MOST_DEPARTED + 50)
    for member in everyone:
        members.leave(sender(member))
    assert [members.leave(sender(member)) for member in everyone] == [None] * len(everyone)


def test_who_lost_its_place_cannot_leave() -> None:
    members, (first, _) = full()
    members.expire(11.0)
    with pytest.raises(Fenced, match="it sent no heartbeat"):
        members.leave(sender(first))


def test_who_waits_for_its_place_has_more_time() -> None:
    members = Membership(1, 2.0)
    waiting = members.join("a", None, "alpha", 1, 0.0, waits=True)
    assert members.expire(JOIN_SECONDS) == []
    members.join("a", None, "alpha", 1, JOIN_SECONDS)
    assert members.expire(JOIN_SECONDS + 2.5) == [waiting]

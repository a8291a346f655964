"""Places, leases and epochs."""

from __future__ import annotations

import pytest

from hubring.ps.core.errors import Fenced
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


def test_a_held_up_server_gives_more_time_to_who_disconnected() -> None:
    members, (first, _) = full()
    members.disconnect(sender(first), now=0.0)
    members.extend_leases(3.0, now=3.0)
    assert members.expire(2.5 + RETURN_SECONDS) == []
    assert members.expire(3.5 + RETURN_SECONDS) == [first]


def test_a_fenced_worker_gets_the_reason_and_the_current_holder_of_its_rank() -> None:
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


def test_a_job_that_often_replaces_workers_does_not_grow() -> None:
    members = Membership(1, 10.0)
    for index in range(MOST_DEPARTED + 50):
        members.leave(sender(join(members, f"token{index}")))
    assert len(members.departed) == len(members.tokens) == MOST_DEPARTED + 1
    assert not members.holds("token0")
    assert members.holds(f"token{MOST_DEPARTED + 49}")


def test_a_worker_that_waits_for_its_rank_has_a_longer_lease() -> None:
    members = Membership(1, 2.0)
    waiting = members.join("a", None, "alpha", 1, 0.0, waits=True)
    assert members.expire(JOIN_SECONDS) == []
    members.join("a", None, "alpha", 1, JOIN_SECONDS)
    assert members.expire(JOIN_SECONDS + 2.5) == [waiting]

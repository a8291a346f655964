"""A ring's generations: who meets, who enters, and when the next one begins."""

from __future__ import annotations

import pytest

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import Member
from hubring.ps.job.generations import Generations

A, B, C, D = (Member(rank, rank + 1) for rank in range(4))


def begun(*members: Member, least: int = 1) -> Generations:
    """Generations whose first one has these members."""
    generations = Generations(least)
    for member in members:
        generations.come(member, str(member.rank), 0.0, boundary=True)
    assert generations.begin(members, 0.0)
    assert generations.current.members == members
    return generations


def test_the_first_generation_waits_for_all_workers() -> None:
    generations = Generations(1)
    generations.come(A, "", 0.0, boundary=True)
    assert not generations.begin([A, B], 0.0)
    assert generations.awaited([A, B]) == [B]
    generations.come(B, "", 0.0, boundary=True)
    assert generations.begin([A, B], 0.0)
    assert (generations.current.number, generations.current.members) == (1, (A, B))


def test_the_next_generation_waits_for_every_member_that_lives() -> None:
    generations = begun(A, B, C)
    assert generations.broken([A, B, C]) == 0
    assert generations.broken([A, C]) == 1
    generations.come(C, "c", 5.0, boundary=False)
    assert not generations.begin([A, C], 6.0)
    assert generations.awaited([A, C]) == [A]
    generations.come(A, "a", 6.0, boundary=False)
    assert generations.begin([A, C], 6.5)
    assert generations.pause == 1.5
    current = generations.current
    assert (current.number, current.members, current.lost) == (2, (A, C), (B,))
    assert [arrival.note for arrival in current.arrivals] == ["a", "c"]
    assert generations.broken([A, C]) == 0


def test_a_member_that_comes_breaks_the_generation_for_the_others() -> None:
    generations = begun(A, B)
    generations.come(A, "", 1.0, boundary=False)
    assert generations.broken([A, B]) == 1  # B has to come, though no member is lost
    generations.come(B, "", 1.0, boundary=False)
    assert generations.begin([A, B], 1.0)
    assert generations.current.members == (A, B)


def test_nobody_is_a_newcomer_to_a_ring_that_has_not_begun() -> None:
    generations = Generations(1)
    generations.come(A, "", 0.0, boundary=True)
    assert generations.newcomers([A, B]) == []


def test_newcomers_enter_behind_the_members_and_only_at_a_boundary() -> None:
    generations = begun(B, C)
    generations.come(A, "new", 0.0, boundary=True)
    assert generations.newcomers([A, B, C]) == [A]
    assert not generations.begin([A, B, C], 0.0)
    assert generations.broken([A, B, C]) == 0  # the members go on until their boundary
    generations.come(B, "", 1.0, boundary=True)
    generations.come(C, "", 1.0, boundary=False)
    generations.begin([A, B, C], 1.0)
    assert generations.current.number == 2
    for member in (B, C):
        generations.come(member, "", 2.0, boundary=True)
    generations.begin([A, B, C], 2.0)
    assert [member.rank for member in generations.current.members] == [1, 2, 0]
    assert [arrival.newcomer for arrival in generations.current.arrivals] == [False, False, True]
    assert generations.newcomers([A, B, C]) == []


def test_a_ring_broke_only_if_a_member_comes_within_a_step() -> None:
    generations = begun(A, B)
    generations.come(C, "", 0.0, boundary=True)
    generations.come(A, "", 1.0, boundary=True)
    broke = [generations.ring_broke]
    generations.come(B, "", 1.0, boundary=False)
    broke.append(generations.ring_broke)
    assert generations.begin([A, B, C], 1.0)
    broke.append(generations.ring_broke)
    assert broke == [False, True, False]


def test_a_lost_newcomer_is_not_waited_for() -> None:
    generations = begun(A, B)
    generations.come(D, "", 0.0, boundary=True)
    for member in (A, B):
        generations.come(member, "", 1.0, boundary=True)
    generations.begin([A, B], 1.0)
    assert generations.current.members == (A, B)


def test_newcomers_cannot_go_on_without_a_member_that_has_the_state() -> None:
    generations = begun(A)
    generations.come(B, "", 0.0, boundary=True)
    assert not generations.begin([B], 1.0)


def test_a_member_that_finishes_is_no_loss() -> None:
    generations = begun(A, B)
    generations.leave(A)
    assert generations.broken([B]) == 0


def test_all_workers_must_agree_on_the_fewest() -> None:
    Generations(2).check(2)
    Generations().check(0)
    with pytest.raises(ConfigError, match="--min-workers 3, and the job has 2"):
        Generations(2).check(3)
    with pytest.raises(ConfigError, match="--min-workers not set, and the job has 2"):
        Generations(2).check(0)

"""Collectives on the hub: contributions in any order, one reply for each rank."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hubring.ps.core.messages import (
    Call,
    Code,
    Collective,
    CollectiveResult,
    Contribute,
    Delivery,
    ReduceOp,
    Refusal,
    Reply,
)
from hubring.ps.core.types import Sender
from hubring.ps.store.collective import layout_of
from hubring.ps.store.collective_rounds import KEPT_BYTES, ROUND_BYTES, RoundBook

LIVE = {0: 10, 1: 11, 2: 12}


def part(
    rank: int,
    *tensors: Tensor,
    collective: Collective = Collective.ALLREDUCE,
    op: ReduceOp = ReduceOp.SUM,
    root: int = 0,
    ranks: tuple[int, ...] = (),
    sequence: int = 1,
    settled: int = 0,
    closed: tuple[int, ...] = (),
    name: str = "loss",
) -> Contribute:
    call = Call(collective, name, op, root, ranks, layouts=tuple(map(layout_of, tensors)))
    return Contribute(Sender(rank, LIVE.get(rank, 99)), sequence, call, tensors, settled, closed)


def join(rank: int, sequence: int = 1) -> Contribute:
    return part(rank, collective=Collective.JOIN, name="join", sequence=sequence)


def play(parts: list[Contribute], book: RoundBook | None = None) -> dict[int, Reply]:
    """Contributes in the order given; the reply of each rank."""
    book = book or RoundBook()
    deliveries: list[Delivery] = []
    for request in parts:
        deliveries += book.contribute(request, request.sender.rank, LIVE)
    return {int(str(ticket)): reply for ticket, reply in deliveries}


def result_of(reply: Reply) -> Tensor:
    assert isinstance(reply, CollectiveResult), reply
    (tensor,) = reply.tensors
    return tensor


def refusal_of(reply: Reply) -> Refusal:
    assert isinstance(reply, Refusal), reply
    return reply


def test_the_order_of_arrival_changes_no_bit() -> None:
    given = [torch.randn(100, generator=torch.Generator().manual_seed(rank)) * 10**rank for rank in range(3)]
    results = [
        result_of(play([part(rank, given[rank]) for rank in order])[0])
        for order in itertools.permutations(range(3))
    ]
    assert all(torch.equal(result, results[0]) for result in results)


# Retries


def test_a_retry_is_answered_as_before_until_its_sender_says_that_it_has_the_reply() -> None:
    book = RoundBook()
    for sequence in (1, 2):
        play([part(rank, torch.ones(1) * sequence, sequence=sequence) for rank in LIVE], book)
    for sequence in (1, 2, 1):
        retried = play([part(1, torch.ones(1), sequence=sequence)], book)
        assert result_of(retried[1]).item() == 3.0 * sequence
    play([part(1, torch.ones(1), name="b", sequence=3, settled=2)], book)
    echo = part(1, torch.ones(1), sequence=1, settled=2)
    assert refusal_of(play([echo], book)[1]).code is Code.OUT_OF_ORDER
    assert result_of(play([part(0, torch.ones(1))], book)[0]).item() == 3.0


def test_numbers_of_a_name_that_fall_are_refused() -> None:
    book = RoundBook()
    play([part(0, torch.ones(1), sequence=5)], book)
    refusal = refusal_of(play([part(0, torch.ones(1), sequence=4)], book)[0])
    assert refusal.code is Code.OUT_OF_ORDER
    assert "after its call 5, which is still open" in refusal.text


@pytest.mark.parametrize("waits", [False, True])
def test_replies_cost_no_memory_for_ever(waits: bool) -> None:
    """Also while an earlier call of a rank waits, so that the rank cannot confirm all replies up to one."""
    book = RoundBook()
    if waits:
        play([part(0, torch.ones(1), name="waits", sequence=1)], book)
    for step in range(2, 20):
        has: Any = {"closed": (step - 1,) if step > 2 else ()} if waits else {"settled": step - 1}
        parts = [part(rank, torch.ones(1), name=f"step {step}", sequence=step, **has) for rank in LIVE]
        assert play(parts, book).keys() == LIVE.keys()
    assert [list(sent.replies) for sent in book._sent.values()] == [[19]] * 3
    assert len(book._open) == waits


# Who is replaced


def test_a_worker_in_a_lost_ones_place_gets_the_results_so_far_and_takes_part_in_the_next() -> None:
    book = RoundBook()
    for sequence in (1, 2):
        play([part(rank, torch.ones(1) * sequence, sequence=sequence) for rank in LIVE], book)
    play([part(1, torch.ones(1), sequence=3)], book)
    live = LIVE | {0: 20}
    assert not book.on_view(live)
    assert book.repeatable == 2

    def call(sequence: int) -> list[float]:
        request = replace(part(0, torch.ones(1) * 9, sequence=sequence), sender=Sender(0, 20))
        return [result_of(reply).item() for _, reply in book.contribute(request, 0, live)]

    assert [call(1), call(1), call(2), call(3)] == [[3.0], [3.0], [6.0], []], "the third waits for rank 2"
    assert [reply for _, reply in book.contribute(part(2, torch.ones(1), sequence=3), 2, live)][1:]


def test_results_are_dropped_when_they_need_much_memory_or_the_job_goes_on_without_a_rank() -> None:
    book = RoundBook()
    for sequence in range(1, 2 + KEPT_BYTES // (ROUND_BYTES + 4)):
        assert book.repeatable == sequence - 1
        play([part(rank, torch.ones(1), sequence=sequence, settled=sequence - 1) for rank in LIVE], book)
    assert not book.repeatable
    assert not book._begun
    book = RoundBook()
    book.on_view(LIVE)
    play([part(rank, torch.ones(1)) for rank in LIVE], book)
    book.on_view({0: 10, 2: 12})
    assert not book.repeatable


# Who is lost


def test_a_round_that_waited_for_a_dead_rank_closes_without_it() -> None:
    book = RoundBook()
    play([part(rank, torch.tensor(2.0 + 2 * rank), op=ReduceOp.AVERAGE) for rank in (0, 1)], book)
    deliveries = book.on_view({0: 10, 1: 11})
    assert [result_of(reply).item() for _, reply in deliveries] == [3.0, 3.0]


def test_the_contribution_of_a_dead_rank_is_dropped() -> None:
    book = RoundBook()
    play([part(0, torch.tensor(2.0)), part(2, torch.tensor(4.0))], book)
    (fenced,) = book.on_view({0: 10, 1: 11})
    assert (fenced.ticket, refusal_of(fenced.reply).code) == (2, Code.FENCED)
    replies = dict(book.contribute(part(1, torch.tensor(1.0)), 1, {0: 10, 1: 11}))
    assert result_of(replies[0]).item() == 3.0


def test_a_new_life_of_a_rank_is_not_taken_for_the_old() -> None:
    book = RoundBook()
    play([part(rank, torch.ones(1)) for rank in LIVE], book)
    book.drop_results()
    play([part(1, torch.ones(1), sequence=2)], book)
    reborn = {**LIVE, 1: 99}
    assert [ticket for ticket, _ in book.on_view(reborn)] == [1]
    book.contribute(part(0, torch.ones(1), sequence=2), 0, reborn)
    book.contribute(part(2, torch.ones(1), sequence=2), 2, reborn)
    first = part(1, torch.ones(1))
    first.sender = Sender(1, 99)
    assert len(book.contribute(first, 1, reborn)) == 3


def test_the_lost_are_never_waited_for_by_whoever_calls_them_by_name() -> None:
    book = RoundBook()
    sent = part(0, torch.ones(1), collective=Collective.TRANSFER, ranks=(0, 2), name="to 2")
    assert book.contribute(sent, 0, LIVE) == []
    ((_, reply),) = book.on_view({0: 10, 1: 11})
    assert "only rank 0 is left" in refusal_of(reply).text


# Groups


def test_a_lost_member_is_left_out_of_its_group() -> None:
    book = RoundBook()
    play([part(0, torch.ones(1), ranks=(0, 1))], book)
    ((ticket, reply),) = book.on_view({0: 10, 2: 12})
    assert (ticket, result_of(reply).item()) == (0, 1.0)


def test_a_rank_outside_the_group_is_refused() -> None:
    refusal = refusal_of(play([part(2, torch.ones(1), ranks=(0, 1))])[2])
    assert refusal.text.startswith("rank 2 is not a member of 'loss'; only ranks [0, 1] can call it")


# Join


def test_a_contribution_made_before_join_counts() -> None:
    book = RoundBook()
    play([part(1, torch.ones(1)), join(1, sequence=2), part(0, torch.ones(1))], book)
    assert result_of(play([part(2, torch.ones(1))], book)[0]).item() == 3.0


def test_joining_ends_without_a_rank_that_is_lost() -> None:
    book = RoundBook()
    play([join(0), join(1)], book)
    assert [result_of(reply).tolist() for _, reply in book.on_view({0: 10, 1: 11})] == [[1], [1]]


def test_a_retried_join_counts_once_and_is_answered_twice() -> None:
    book = RoundBook()
    assert play([join(0), join(0), join(1)], book) == {}
    assert [ticket for ticket, _ in book.contribute(join(2), 2, LIVE)] == [0, 0, 1, 2]


# Any schedule


@settings(deadline=None)
@given(st.data())
def test_each_call_counts_once_in_any_order_and_when_repeated(data: st.DataObject) -> None:
    """Ranks make the same calls, each in an order of its own, and repeat any that is not yet settled."""
    names = data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=6))
    own = {rank: data.draw(st.permutations(names)) for rank in LIVE}
    book, sent, answers = RoundBook(), dict.fromkeys(LIVE, 0), dict[tuple[int, int], set[float]]()

    def settled(rank: int) -> int:
        return next((number for number in range(sent[rank]) if (rank, number + 1) not in answers), sent[rank])

    def send(rank: int, number: int) -> None:
        name = own[rank][number - 1]
        turn = list(own[rank][:number]).count(name)
        value = torch.tensor(float(10**rank * turn))
        request = part(rank, value, name=name, sequence=number, settled=min(settled(rank), number - 1))
        for ticket, reply in book.contribute(request, (rank, number), LIVE):
            assert isinstance(ticket, tuple)
            answers.setdefault(ticket, set()).add(result_of(reply).item())

    while any(sent[rank] < len(names) for rank in LIVE):
        rank = data.draw(st.sampled_from([rank for rank in LIVE if sent[rank] < len(names)]))
        sent[rank] += 1
        send(rank, sent[rank])
        waiting = range(settled(rank) + 1, sent[rank] + 1)
        for number in data.draw(st.lists(st.sampled_from(waiting), max_size=2)) if waiting else []:
            send(rank, number)
    for (rank, number), values in answers.items():
        name = own[rank][number - 1]
        assert values == {111.0 * list(own[rank][:number]).count(name)}
    assert len(answers) == 3 * len(names)
    assert not book._open

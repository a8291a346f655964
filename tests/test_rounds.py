"""Collectives on the hub: contributions in any order, one reply for each rank."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from ps.messages import Code, Collective, Contribute, Delivery, ReduceOp, Refusal, Reply, Result
from ps.rounds import RoundBook
from ps.types import Sender

LIVE = {0: 10, 1: 11, 2: 12}


def part(
    rank: int,
    tensor: Tensor | None = None,
    collective: Collective = Collective.ALLREDUCE,
    *,
    op: ReduceOp = ReduceOp.SUM,
    root: int = 0,
    sequence: int = 0,
    name: str = "loss",
) -> Contribute:
    return Contribute(Sender(rank, LIVE[rank]), name, collective, sequence, tensor, op, root)


def play(parts: list[Contribute], book: RoundBook | None = None) -> dict[int, Reply]:
    """Contributes in the order given; the reply of each rank."""
    book = book or RoundBook()
    deliveries: list[Delivery] = []
    for request in parts:
        deliveries += book.contribute(request, request.sender.rank, LIVE)
    return {int(str(ticket)): reply for ticket, reply in deliveries}


def result_of(reply: Reply) -> Tensor:
    assert isinstance(reply, Result), reply
    assert reply.tensor is not None
    return reply.tensor


def refusal_of(reply: Reply) -> Refusal:
    assert isinstance(reply, Refusal), reply
    return reply


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOp.SUM, [7.0, 0.0]),
        (ReduceOp.AVERAGE, [7 / 3, 0.0]),
        (ReduceOp.MIN, [1.0, -4.0]),
        (ReduceOp.MAX, [4.0, 3.0]),
        (ReduceOp.PRODUCT, [8.0, -12.0]),
    ],
)
def test_allreduce_gives_every_rank_the_reduction(op: ReduceOp, expected: list[float]) -> None:
    given = [torch.tensor([1.0, 3.0]), torch.tensor([2.0, 1.0]), torch.tensor([4.0, -4.0])]
    replies = play([part(rank, given[rank], op=op) for rank in (2, 0, 1)])
    assert replies.keys() == LIVE.keys()
    for reply in replies.values():
        torch.testing.assert_close(result_of(reply), torch.tensor(expected))
    assert torch.equal(given[0], torch.tensor([1.0, 3.0]))


def test_the_order_of_arrival_changes_no_bit() -> None:
    given = [torch.randn(100, generator=torch.Generator().manual_seed(rank)) * 10**rank for rank in range(3)]
    results = [
        result_of(play([part(rank, given[rank]) for rank in order])[0])
        for order in itertools.permutations(range(3))
    ]
    assert all(torch.equal(result, results[0]) for result in results)


def test_nobody_is_answered_before_everybody_has_contributed() -> None:
    assert play([part(0, torch.ones(1)), part(2, torch.ones(1))]) == {}


def test_an_average_of_integers_is_refused_to_every_rank() -> None:
    replies = play([part(rank, torch.ones(1, dtype=torch.int64), op=ReduceOp.AVERAGE) for rank in LIVE])
    assert [refusal_of(replies[rank]).code for rank in LIVE] == [Code.BAD_REQUEST] * 3
    assert "torch.int64; sum it, or convert" in refusal_of(replies[0]).text


def test_integers_sum_exactly() -> None:
    big = torch.tensor([2**60 + 1])
    assert result_of(play([part(rank, big) for rank in LIVE])[0]).item() == 3 * (2**60 + 1)


def test_broadcast_gives_what_the_root_gave() -> None:
    given = torch.tensor([[1, 2]])
    parts = [part(rank, given if rank == 1 else None, Collective.BROADCAST, root=1) for rank in LIVE]
    result = result_of(play(parts)[2])
    assert torch.equal(result, given)
    assert result.data_ptr() != given.data_ptr()


def test_a_root_that_takes_no_part_is_named() -> None:
    replies = play([part(rank, None, Collective.BROADCAST, root=7) for rank in LIVE])
    assert "root 7 takes no part in it; ranks taking part: 0, 1, 2" in refusal_of(replies[0]).text
    replies = play([part(rank, None, Collective.BROADCAST, root=1) for rank in LIVE])
    assert "root 1 gave no tensor" in refusal_of(replies[2]).text


def test_allgather_concatenates_in_rank_order_whatever_the_first_dimensions() -> None:
    given = [torch.full((rank, 2), float(rank)) for rank in range(3)]
    parts = [part(rank, given[rank], Collective.ALLGATHER) for rank in (2, 1, 0)]
    assert torch.equal(result_of(play(parts)[0]), torch.cat(given))


def test_allgather_takes_scalars_as_one_element_each() -> None:
    parts = [part(rank, torch.tensor(float(rank)), Collective.ALLGATHER) for rank in LIVE]
    assert result_of(play(parts)[0]).tolist() == [0.0, 1.0, 2.0]


def test_a_barrier_opens_for_all_at_once() -> None:
    assert play([part(rank, None, Collective.BARRIER) for rank in LIVE]) == dict.fromkeys(LIVE, Result())


@pytest.mark.parametrize(
    ("odd", "spelt"),
    [
        (part(1, torch.ones(3)), "rank 1 sent allreduce sum float32[3]"),
        (part(1, torch.ones(2, dtype=torch.float64)), "rank 1 sent allreduce sum float64[2]"),
        (part(1, torch.ones(2), op=ReduceOp.MAX), "rank 1 sent allreduce max float32[2]"),
        (part(1, torch.ones(2), Collective.ALLGATHER), "rank 1 sent allgather float32[2]"),
        (part(1, None, Collective.BROADCAST, root=2), "rank 1 sent broadcast from rank 2 without a tensor"),
        (part(1, None, Collective.BARRIER), "rank 1 sent barrier"),
    ],
)
def test_ranks_that_disagree_are_all_told_who_sent_what(odd: Contribute, spelt: str) -> None:
    replies = play([part(0, torch.ones(2)), odd, part(2, torch.ones(2))])
    assert {refusal_of(replies[rank]).code for rank in LIVE} == {Code.MISMATCH}
    text = refusal_of(replies[2]).text
    assert "'loss'" in text
    assert "rank 0 sent allreduce sum float32[2]" in text
    assert spelt in text


def test_allgather_disagrees_in_any_dimension_but_the_first() -> None:
    replies = play([part(rank, torch.ones(2, 1 + (rank == 2)), Collective.ALLGATHER) for rank in LIVE])
    assert refusal_of(replies[0]).code is Code.MISMATCH


def test_a_reduction_of_nothing_is_refused() -> None:
    assert "allreduce sum without a tensor" in refusal_of(play([part(rank) for rank in LIVE])[0]).text


def test_rounds_under_other_names_do_not_meet() -> None:
    book = RoundBook()
    play([part(0, torch.ones(1), name="a"), part(1, torch.ones(1), name="a")], book)
    assert play([part(2, torch.ones(1), name="b")], book) == {}
    assert play([part(2, torch.ones(1), name="a")], book).keys() == LIVE.keys()


def test_a_retry_in_an_open_round_is_answered_with_the_first_try_and_counts_once() -> None:
    book = RoundBook()
    book.contribute(part(0, torch.ones(1)), "first", LIVE)
    assert book.contribute(part(0, torch.ones(1)), "second", LIVE) == []
    book.contribute(part(1, torch.ones(1)), "other", LIVE)
    deliveries = book.contribute(part(2, torch.ones(1)), "last", LIVE)
    assert [ticket for ticket, _ in deliveries] == ["first", "second", "other", "last"]
    assert result_of(deliveries[0].reply).item() == 3.0


def test_a_retry_of_a_closed_round_is_answered_as_before_until_the_next_closes() -> None:
    book = RoundBook()
    play([part(rank, torch.ones(1)) for rank in LIVE], book)
    assert result_of(play([part(1, torch.ones(1))], book)[1]).item() == 3.0
    play([part(rank, torch.ones(1) * 2, sequence=1) for rank in LIVE], book)
    assert result_of(play([part(1, torch.ones(1) * 2, sequence=1)], book)[1]).item() == 6.0
    assert refusal_of(play([part(1, torch.ones(1))], book)[1]).code is Code.OUT_OF_ORDER


def test_a_second_round_under_a_name_waits_for_the_first() -> None:
    book = RoundBook()
    play([part(0, torch.ones(1))], book)
    refusal = refusal_of(play([part(0, torch.ones(1), sequence=1)], book)[0])
    assert refusal.code is Code.OUT_OF_ORDER
    assert "while its round 0 is open" in refusal.text


def test_a_round_that_waited_for_a_dead_rank_closes_without_it() -> None:
    book = RoundBook()
    play(
        [part(0, torch.tensor(2.0), op=ReduceOp.AVERAGE), part(1, torch.tensor(4.0), op=ReduceOp.AVERAGE)],
        book,
    )
    deliveries = book.on_view({0: 10, 1: 11})
    assert [result_of(reply).item() for _, reply in deliveries] == [3.0, 3.0]


def test_what_a_dead_rank_gave_counts_no_more() -> None:
    book = RoundBook()
    play([part(0, torch.tensor(2.0)), part(2, torch.tensor(4.0))], book)
    (fenced,) = book.on_view({0: 10, 1: 11})
    assert (fenced.ticket, refusal_of(fenced.reply).code) == (2, Code.FENCED)
    replies = dict(book.contribute(part(1, torch.tensor(1.0)), 1, {0: 10, 1: 11}))
    assert result_of(replies[0]).item() == 3.0


def test_a_new_life_of_a_rank_is_not_taken_for_the_old() -> None:
    book = RoundBook()
    play([part(rank, torch.ones(1)) for rank in LIVE], book)
    play([part(1, torch.ones(1), sequence=1)], book)
    reborn = {**LIVE, 1: 99}
    assert [ticket for ticket, _ in book.on_view(reborn)] == [1]
    book.contribute(part(0, torch.ones(1), sequence=1), 0, reborn)
    book.contribute(part(2, torch.ones(1), sequence=1), 2, reborn)
    first = Contribute(Sender(1, 99), "loss", Collective.ALLREDUCE, 0, torch.ones(1))
    assert len(book.contribute(first, 1, reborn)) == 3


def test_giving_up_refuses_every_open_round_once() -> None:
    book = RoundBook()
    play([part(0, torch.ones(1), name="a"), part(1, torch.ones(1), name="b")], book)
    refusal = Refusal(Code.JOB_FAILED, "the disk is full")
    assert sorted(book.refuse_all(refusal)) == [Delivery(0, refusal), Delivery(1, refusal)]
    assert book.refuse_all(refusal) == []


def test_names_that_change_every_step_cost_no_memory_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps.rounds.KEPT", 6)
    book = RoundBook()
    for step in range(20):
        play([part(rank, torch.ones(1), sequence=step, name=f"step {step}") for rank in LIVE], book)
    assert len(book._last) == 6
    retried = play([part(0, torch.ones(1), sequence=19, name="step 19")], book)
    assert torch.equal(result_of(retried[0]), torch.tensor([3.0]))

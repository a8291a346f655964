"""What members' parts give each of them, and how it is said when they do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hubring.ps.core.messages import Call, Code, Collective, ReduceOp, Refusal
from hubring.ps.store.collective import Part, dealt, layout_of, objection, outcome, spell


def call(collective: Collective, *tensors: Tensor, **said: object) -> Call:
    return Call(collective, "x", layouts=tuple(map(layout_of, tensors)), **said)  # type: ignore[arg-type]


def part(rank: int, collective: Collective, *tensors: Tensor, **said: object) -> Part:
    return Part(rank, call(collective, *tensors, **said), tensors)


def results(parts: list[Part]) -> dict[int, list[list[float]]]:
    """Each member's tensors as lists."""
    came = outcome(parts)
    assert not isinstance(came, Refusal), came.text
    return {rank: [tensor.tolist() for tensor in tensors] for rank, tensors in came.items()}


def refused(parts: list[Part]) -> Refusal:
    came = outcome(parts)
    assert isinstance(came, Refusal)
    return came


def test_members_are_known_by_rank_whatever_ranks_they_are() -> None:
    given = [part(rank, Collective.REDUCE, torch.tensor([rank]), root=5) for rank in (2, 5, 7)]
    assert results(given) == {2: [], 5: [[14]], 7: []}


def test_rows_are_dealt_out_and_the_first_get_one_more() -> None:
    assert [dealt(7, 3), dealt(2, 3), dealt(0, 2)] == [[3, 2, 2], [1, 1, 0], [0, 0]]
    given = [part(rank, Collective.REDUCE_SCATTER, torch.tensor([1, 2, 3])) for rank in (0, 1)]
    assert results(given) == {0: [[2, 4]], 1: [[6]]}


def test_alltoall_gives_the_rows_and_their_numbers() -> None:
    given = [
        part(0, Collective.ALLTOALL, torch.tensor([1, 2, 3]), splits=(1, 2)),
        part(1, Collective.ALLTOALL, torch.tensor([4, 5])),
    ]
    assert results(given) == {0: [[1, 4], [1, 1]], 1: [[2, 3, 5], [2, 1]]}


def test_what_one_gives_alone_is_copied() -> None:
    given = torch.ones(2)
    for collective in (Collective.BROADCAST, Collective.GATHER, Collective.SCATTER, Collective.ALLGATHER):
        came = outcome([part(0, collective, given)])
        assert not isinstance(came, Refusal)
        assert came[0][0].data_ptr() != given.data_ptr()


def test_a_transfer_is_for_the_other_alone() -> None:
    sent = part(4, Collective.TRANSFER, torch.ones(1), root=4)
    assert results([part(1, Collective.TRANSFER, root=4), sent]) == {1: [[1.0]], 4: []}
    assert "only rank 4 is left" in refused([sent]).text


def test_a_joined_rank_stands_in_a_reduction_with_zeros() -> None:
    given = [part(rank, Collective.ALLREDUCE, torch.full((2,), 3.0), op=ReduceOp.AVERAGE) for rank in (0, 2)]
    came = outcome(given, joined=[1])
    assert not isinstance(came, Refusal)
    assert [came[rank][0].tolist() for rank in (0, 2)] == [[2.0, 2.0]] * 2
    assert objection({0: call(Collective.BARRIER)}, joined=[1]) is None
    assert objection({0: call(Collective.REDUCE, torch.ones(1), root=0)}, joined=[1]) is None


@pytest.mark.parametrize(
    "collective",
    sorted(set(Collective) - {Collective.ALLREDUCE, Collective.REDUCE, Collective.BARRIER, Collective.JOIN}),
)
def test_what_would_miss_the_part_of_a_joined_rank_is_refused(collective: Collective) -> None:
    rows = torch.arange(6.0).view(2, 3)
    refusal = outcome([part(0, collective, rows)], joined=[1])
    assert isinstance(refusal, Refusal)
    word = collective.name.lower()
    assert f"{word} is not supported after join(): rank 1 has joined" in refusal.text
    assert f"call {word} before any rank calls join()" in refusal.text


def test_a_reduction_to_a_joined_root_is_refused_and_names_all_joined_ranks() -> None:
    refusal = objection({0: call(Collective.REDUCE, torch.ones(1), root=2)}, joined=[2, 1])
    assert refusal is not None
    assert "reduce is not supported after join(): ranks 1, 2 have joined" in refusal.text


def test_a_broadcast_compares_what_is_expected_with_what_is_given() -> None:
    given = call(Collective.BROADCAST, torch.ones(2))
    silent, other = call(Collective.BROADCAST), call(Collective.BROADCAST, torch.ones(3))
    assert objection({0: given, 1: given, 2: silent}) is None
    refusal = objection({0: given, 1: silent, 2: other})
    assert refusal is not None
    assert refusal.code is Code.MISMATCH
    assert (
        "rank 0 sent broadcast from rank 0 float32[2]; rank 2 sent broadcast from rank 0 float32[3]"
        in refusal.text
    )


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([part(1, Collective.BROADCAST, root=7)], "root 7 is not a member; members: 1"),
        ([part(1, Collective.BROADCAST, root=1)], "root 1 passed no tensor"),
        ([part(1, Collective.SCATTER, root=1)], "root 1 passed 0 tensors to scatter"),
        (
            [part(0, Collective.REDUCE, torch.ones(1).bool(), op=ReduceOp.AVERAGE)],
            "average does not support torch.bool",
        ),
        ([part(0, Collective.ALLTOALL, torch.ones(2), splits=(1,))], r"rank 0 splits 2 rows as [1]"),
        ([part(0, Collective.ALLTOALL)], "ranks passed 0 tensors to alltoall; pass one"),
        ([part(0, Collective.REDUCE_SCATTER, torch.ones(()))], "has no rows to scatter"),
    ],
)
def test_what_makes_no_sense_is_named(parts: list[Part], says: str) -> None:
    refusal = refused(parts)
    assert refusal.code is Code.BAD_REQUEST
    assert "'x': " in refusal.text
    assert says in refusal.text


def test_calls_are_spelt_with_all_that_must_agree() -> None:
    assert spell(call(Collective.BARRIER)) == "barrier"
    assert spell(call(Collective.ALLREDUCE, torch.ones(2), op=ReduceOp.MAX)) == "allreduce max float32[2]"
    assert spell(call(Collective.REDUCE, torch.ones(()), root=3)) == "reduce sum to rank 3 float32[]"
    assert spell(call(Collective.SCATTER, root=2)) == "scatter from rank 2 without a tensor"
    assert (
        spell(call(Collective.ALLTOALL, torch.ones(2), splits=(2, 0)))
        == "alltoall split as [2, 0] float32[2]"
    )
    assert spell(call(Collective.GROUP, splits=(0, 2))) == "group of ranks [0, 2]"
    many = call(Collective.ALLGATHER, *[torch.ones(at) for at in range(9)])
    assert spell(many, 7) == "allgather 9 tensors (number 7: float32[7])"

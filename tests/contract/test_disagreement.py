"""What ranks do not agree on, or cannot be done, is an error on all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.core.messages import Call, Collective, ReduceOp
from hubring.workers import collectives as c
from hubring.workers.communicators.base import Communicator
from tests.support.training.rank_pool import RankPool


def odd(rank: int) -> dict[str, Callable[[Communicator], object]]:
    """What rank 1 does unlike the others."""
    ones, one = torch.ones, rank == 1
    size, dtype = 3 if one else 2, torch.float64 if one else torch.float32
    return {
        "shape": lambda own: c.allreduce(ones(size), communicator=own),
        "dtype": lambda own: c.allreduce(ones(2, dtype=dtype), communicator=own),
        "op": lambda own: c.allreduce(ones(2), ReduceOp.MAX if one else ReduceOp.SUM, communicator=own),
        "root": lambda own: c.broadcast(ones(2), int(one), communicator=own),
        "broadcast": lambda own: c.broadcast(ones(size), 2, communicator=own),
        "reduce": lambda own: c.reduce(ones(2), int(one), communicator=own),
        "columns": lambda own: c.allgather(ones(2, size), communicator=own),
        "kind": lambda own: (c.allgather if one else c.allreduce)(ones(2), name="k", communicator=own),
        "count": lambda own: c.grouped_allreduce([ones(1)] * (9 if one else 8), communicator=own),
        "one of many": lambda own: c.grouped_allreduce([*[ones(1)] * 8, ones(size - 1)], communicator=own),
        "group": lambda own: c.new_group([0, 1] if one else [0, 2], communicator=own),
        "rows": lambda own: c.alltoall(ones(3, 4 if one else 5), communicator=own),
    }


@pytest.mark.parametrize(
    ("what", "usual", "other"),
    [
        ("shape", "allreduce average float32[2]", "allreduce average float32[3]"),
        ("dtype", "float32[2]", "float64[2]"),
        ("op", "allreduce sum", "allreduce max"),
        ("root", "broadcast from rank 0 float32[2]", "broadcast from rank 1"),
        ("broadcast", "broadcast from rank 2 float32[2]", "broadcast from rank 2 float32[3]"),
        ("reduce", "reduce average to rank 0", "reduce average to rank 1"),
        ("columns", "allgather float32[2, 2]", "allgather float32[2, 3]"),
        ("kind", "allreduce average float32[2]", "allgather float32[2]"),
        ("count", "allreduce average 8 tensors", "allreduce average 9 tensors (number 8: float32[1])"),
        ("one of many", "9 tensors (number 8: float32[1])", "9 tensors (number 8: float32[2])"),
        ("group", "group of ranks [0, 2]", "group of ranks [0, 1]"),
        ("rows", "alltoall float32[3, 5]", "alltoall float32[3, 4]"),
    ],
)
def test_ranks_that_disagree_are_all_told_who_sent_what(
    three: RankPool, what: str, usual: str, other: str
) -> None:
    def action(communicator: Communicator) -> str:
        with pytest.raises(ConfigError) as caught:
            odd(communicator.rank)[what](communicator)
        c.barrier(communicator=communicator)  # and the others go on
        return str(caught.value)

    (text,) = set(three.run(action))
    assert f"rank 0 sent {usual}" in text.replace("allreduce average ", "") or f"rank 0 sent {usual}" in text
    assert other in text
    assert "rank 2 sent" in text


def on(call: Callable[..., object], *given: object) -> Callable[[Communicator], object]:
    return lambda own: call(*given, communicator=own)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (on(c.alltoall, torch.ones(4)), "rank 0 passed 4 rows, which are not divisible by 3"),
        (
            lambda own: c.alltoall(torch.ones(4), [1, 1, 2 + (own.rank == 1)], communicator=own),
            r"rank 1 splits 4 rows as \[1, 1, 3\]; pass 3 counts that add up to 4",
        ),
        (on(c.alltoall, torch.ones(4), [5, -1, 0]), r"rank 0 splits 4 rows as \[5, -1, 0\]"),
        (on(c.alltoall, torch.ones(())), "rank 0 passed a tensor without dimensions"),
        (on(c.reduce_scatter, torch.ones(())), "has no rows to scatter"),
        (
            lambda own: c.scatter([torch.ones(1)] * 2 if own.rank == 0 else None, communicator=own),
            "root 0 passed 2 tensors to scatter; pass one for each of ranks 0, 1, 2",
        ),
        (
            lambda own: own.collective(Call(Collective.BROADCAST, "none", root=1)).get(),
            r"root 1 passed no tensor; pass the tensor on the root \(members: 0, 1, 2\)",
        ),
    ],
)
def test_an_invalid_collective_call_raises_on_every_rank(
    three: RankPool, call: Callable[[Communicator], object], says: str
) -> None:
    def action(communicator: Communicator) -> None:
        with pytest.raises(ConfigError, match=says):
            call(communicator)

    three.run(action)
    three.run(action)  # nobody has fallen behind


@pytest.mark.parametrize("root", [-1, 7])
def test_a_root_that_is_no_rank_is_refused(three: RankPool, root: int) -> None:
    own = three.communicators[0]
    for call in (c.broadcast, c.reduce, c.gather):
        with pytest.raises(UsageError, match=f"root is {root}; it must be 0 to 2"):
            call(torch.zeros(1), root, communicator=own)


@pytest.mark.parametrize("call", [c.broadcast, c.allreduce])
def test_a_dtype_that_does_not_travel_is_refused_on_the_root_and_the_other_ranks(
    three: RankPool, call: Callable[..., object]
) -> None:
    told = r"dtype torch\.complex64 is not supported; convert the tensor to one of float64"
    for communicator in three.communicators:
        with pytest.raises(UsageError, match=told):
            call(torch.ones(1, dtype=torch.complex64), communicator=communicator)


def test_scatter_ignores_the_tensors_of_ranks_other_than_the_root(three: RankPool) -> None:
    def action(communicator: Communicator) -> float:
        own = [torch.tensor(communicator.rank * 10.0 + at) for at in range(3 + communicator.rank)]
        return c.scatter(own, communicator=communicator).item()

    assert three.run(action) == [0.0, 1.0, 2.0]

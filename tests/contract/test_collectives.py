"""One suite for every collective: hub and ring, one to four ranks, every dtype, the same results."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hubring.ps.core.errors import ConfigError, DeadlineExceeded, UsageError
from hubring.ps.core.messages import Call, Collective, ReduceOp
from hubring.ps.core.types import DTYPE_BYTES
from hubring.ps.store.reduction import adasum
from hubring.workers import collectives as c
from hubring.workers.communicators.base import Communicator
from tests.support.crew import Crew

LIMIT = 60.0
DTYPES = [getattr(torch, name) for name in DTYPE_BYTES]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SIZES = [1, 2, 3, 4]
LARGE = 3001
"""Elements of what a ring does not gather but reduces by torch.distributed."""


@pytest.fixture(scope="module")
def crews() -> Iterator[Callable[[str, int], Crew]]:
    made: dict[tuple[str, int], Crew] = {}

    def crew(topology: str, size: int) -> Crew:
        if (topology, size) not in made:
            made[topology, size] = Crew(topology, size)
        return made[topology, size]

    yield crew
    for one in made.values():
        one.close()


@pytest.fixture(
    params=list(itertools.product(["hub", "ring"], SIZES)), ids=lambda which: f"{which[0]}{which[1]}"
)
def crew(request: pytest.FixtureRequest, crews: Callable[[str, int], Crew]) -> Crew:
    return crews(*request.param)


@pytest.fixture(params=["hub3", "ring3"])
def three(request: pytest.FixtureRequest, crews: Callable[[str, int], Crew]) -> Crew:
    return crews(request.param[:-1], 3)


def given_by(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Small numbers, different on every rank, of which no reduction of four overflows an int8."""
    numbers = torch.arange(torch.Size(shape).numel()).add(rank * 3).remainder(4).reshape(shape)
    if dtype is torch.bool:
        return numbers.ge(2)
    return numbers.to(dtype).sub(0 if dtype is torch.uint8 else 1)


def expected(parts: list[Tensor], op: ReduceOp) -> Tensor:
    stack = torch.stack(parts)
    if stack.dtype is torch.bool:
        return stack.any(0) if op in (ReduceOp.SUM, ReduceOp.MAX) else stack.all(0)
    wide = stack.double() if stack.is_floating_point() else stack.long()
    match op:
        case ReduceOp.SUM:
            total = wide.sum(0)
        case ReduceOp.AVERAGE:
            total = wide.mean(0)
        case ReduceOp.MIN:
            total = wide.amin(0)
        case ReduceOp.MAX:
            total = wide.amax(0)
        case ReduceOp.PRODUCT:
            total = wide.prod(0)
        case ReduceOp.ADASUM:
            total = adasum(list(wide))
    return total.to(stack.dtype)


def ops(dtype: torch.dtype) -> list[ReduceOp]:
    averaging = (ReduceOp.AVERAGE, ReduceOp.ADASUM)
    return [op for op in ReduceOp if dtype.is_floating_point or op not in averaging]


# Reductions


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allreduce_does_every_op_in_every_dtype_whatever_the_size(crew: Crew, dtype: torch.dtype) -> None:
    def action(communicator: Communicator) -> None:
        for op, shape in itertools.product(ops(dtype), [(), (0,), (2, 3), (LARGE,)]):
            parts = [given_by(rank, dtype, *shape) for rank in range(crew.size)]
            mine = parts[communicator.rank].clone()
            result = c.allreduce(mine, op, communicator=communicator)
            torch.testing.assert_close(result, expected(parts, op))
            assert torch.equal(mine, parts[communicator.rank])

    crew.run(action)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_hub_and_ring_reduce_to_the_same(
    crews: Callable[[str, int], Crew], dtype: torch.dtype, size: int
) -> None:
    def part(rank: int, numel: int) -> Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).mul(9).to(dtype)

    def action(communicator: Communicator) -> list[Tensor]:
        return [
            c.allreduce(part(communicator.rank, numel), op, communicator=communicator)
            for numel, op in itertools.product([100, LARGE], ops(dtype))
        ]

    hub, ring = crews("hub", size).run(action), crews("ring", size).run(action)
    small = len(ops(dtype))
    for on_hub, on_ring in zip(hub, ring, strict=True):
        for place, (one, other) in enumerate(zip(on_hub, on_ring, strict=True)):
            if place < small or not dtype.is_floating_point or size < 3:
                assert torch.equal(one, other)
            else:  # the order of summation is the ring's own
                torch.testing.assert_close(one, other)
        assert all(torch.equal(one, first) for one, first in zip(on_hub, hub[0], strict=True))
    for on_ring in ring:
        assert all(torch.equal(one, first) for one, first in zip(on_ring, ring[0], strict=True))


@pytest.mark.parametrize("numel", [4, LARGE])
def test_a_nan_of_one_rank_is_everybodys(three: Crew, numel: int) -> None:
    def action(communicator: Communicator) -> None:
        own = torch.ones(numel)
        own[communicator.rank] = float("nan")
        for op in ReduceOp:
            result = c.allreduce(own, op, communicator=communicator)
            assert result.isnan().tolist()[:3] == [True] * 3

    three.run(action)


@pytest.mark.parametrize("numel", [5, LARGE])
def test_half_precision_sums_are_rounded_once(crew: Crew, numel: int) -> None:
    # In bfloat16 256 + 1 is 256: rounded at every addition, the ones would be lost.
    def action(communicator: Communicator) -> list[float]:
        own = torch.full((numel,), 256.0 if communicator.rank == 0 else 1.0, dtype=torch.bfloat16)
        return c.allreduce(own, ReduceOp.SUM, communicator=communicator).tolist()

    total = torch.tensor(256.0 + crew.size - 1).bfloat16().item()
    assert crew.run(action) == [[total] * numel] * crew.size


def test_integers_are_summed_exactly_and_wrap_as_torchs_do(crew: Crew) -> None:
    def action(communicator: Communicator) -> None:
        for numel in (1, LARGE):
            big = torch.full((numel,), 2**60 + 1)
            assert c.allreduce(big, ReduceOp.SUM, communicator=communicator)[-1] == crew.size * (2**60 + 1)
            short = torch.full((numel,), 100, dtype=torch.int8)
            total = torch.tensor(100 * crew.size).to(torch.int8)
            assert c.allreduce(short, ReduceOp.SUM, communicator=communicator)[-1] == total

    crew.run(action)


def test_an_average_of_integers_is_refused(crew: Crew) -> None:
    def action(communicator: Communicator) -> None:
        for op in (ReduceOp.AVERAGE, ReduceOp.ADASUM):
            with pytest.raises(
                ConfigError, match=rf"no {op.name.lower()} of torch\.int64; sum it, or convert"
            ):
                c.allreduce(torch.tensor([1]), op, communicator=communicator)

    crew.run(action)


def test_the_forms_that_end_in_an_underscore_write_where_they_read(crew: Crew) -> None:
    def action(communicator: Communicator) -> None:
        whole = torch.full((2, 4), float(communicator.rank), requires_grad=True)
        column = whole.detach()[:, 1]
        assert c.allreduce_(column, ReduceOp.SUM, communicator=communicator) is column
        total = float(sum(range(crew.size)))
        assert whole[:, 1].tolist() == [total] * 2
        assert whole[:, 0].tolist() == [communicator.rank] * 2
        assert c.broadcast_(whole, crew.size - 1, communicator=communicator) is whole
        assert whole[:, 0].tolist() == [crew.size - 1] * 2
        several = [torch.tensor(1.0), torch.ones(2, dtype=torch.int64)]
        works = [c.grouped_allreduce_async_(several, ReduceOp.SUM, communicator=communicator)]
        assert works[0].get() == several
        assert several[1].tolist() == [crew.size] * 2

    crew.run(action)


@pytest.mark.slow
@pytest.mark.parametrize("numel", [3, LARGE])
@pytest.mark.parametrize("op", list(ReduceOp))
def test_a_group_of_tensors_is_reduced_as_one_by_one(crew: Crew, op: ReduceOp, numel: int) -> None:
    dtypes = [dtype for dtype in DTYPES if op in ops(dtype)]

    parts = [
        [given_by(rank, dtype, *shape) for rank in range(crew.size)]
        for dtype in dtypes
        for shape in [(), (numel,), (0, 2), (2, 3)]
    ]

    def action(communicator: Communicator) -> None:
        own = [tensors[communicator.rank] for tensors in parts]
        together = c.grouped_allreduce(own, op, communicator=communicator)
        for one, tensors in zip(together, parts, strict=True):
            torch.testing.assert_close(one, expected(tensors, op))

    crew.run(action)


def test_a_group_of_no_tensors_is_no_error(crew: Crew) -> None:
    assert crew.run(lambda own: c.grouped_allreduce([], communicator=own)) == [[]] * crew.size


@pytest.mark.parametrize("numel", [4, LARGE])
def test_reduce_gives_the_root_alone(crew: Crew, numel: int) -> None:
    parts = [given_by(rank, torch.float32, numel) for rank in range(crew.size)]
    last = crew.size - 1
    asked = [(last, op) for op in ReduceOp] + [(root, ReduceOp.SUM) for root in range(last)]

    def action(own: Communicator) -> list[Tensor | None]:
        return [c.reduce(parts[own.rank], root, op, communicator=own) for root, op in asked]

    for (root, op), results in zip(asked, zip(*crew.run(action), strict=True), strict=True):
        assert [rank for rank, result in enumerate(results) if result is not None] == [root]
        torch.testing.assert_close(results[root], expected(parts, op))


@pytest.mark.parametrize("rows", [0, 1, 5, 8, LARGE])
def test_reduce_scatter_deals_out_the_rows_of_an_allreduce(crew: Crew, rows: int) -> None:
    def action(communicator: Communicator) -> Tensor:
        own = given_by(communicator.rank, torch.float64, rows, 2)
        mine = c.reduce_scatter(own, communicator=communicator)
        both = c.grouped_reduce_scatter([own, own.long()], ReduceOp.SUM, communicator=communicator)
        torch.testing.assert_close(both[0], mine * crew.size)
        assert torch.equal(both[0].long(), both[1])
        return mine

    parts = crew.run(action)
    whole = expected([given_by(rank, torch.float64, rows, 2) for rank in range(crew.size)], ReduceOp.AVERAGE)
    torch.testing.assert_close(torch.cat(parts), whole)
    assert [len(part) for part in parts] == [
        rows // crew.size + (rank < rows % crew.size) for rank in range(crew.size)
    ]


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE])
def test_sparse_tensors_are_summed_as_dense_ones(crew: Crew, op: ReduceOp) -> None:
    def dense(rank: int) -> Tensor:
        whole = torch.zeros(10, 3)
        whole[rank], whole[5] = rank + 1.0, 1.0
        return whole

    def action(communicator: Communicator) -> None:
        sparse = dense(communicator.rank).to_sparse(1)
        result = c.allreduce(sparse, op, communicator=communicator)
        assert result.is_sparse
        whole = c.allreduce(dense(communicator.rank), op, communicator=communicator)
        torch.testing.assert_close(result.to_dense(), whole)
        empty = c.allreduce(torch.zeros(4).to_sparse(), op, communicator=communicator)
        assert empty.to_dense().tolist() == [0.0] * 4

    crew.run(action)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int16, torch.int64, torch.uint8, torch.bool], ids=str)
def test_sparse_sums_are_those_of_dense_tensors_in_every_dtype(crew: Crew, dtype: torch.dtype) -> None:
    """In bfloat16 256 + 1 is 256: rounded at every addition, the ones would be lost."""

    def action(communicator: Communicator) -> None:
        rows = torch.tensor([[0, 2, 2, 2, communicator.rank]])
        values = torch.tensor([[1], [256 if dtype.is_floating_point else 3], [1], [1], [1]]).to(dtype)
        own = torch.sparse_coo_tensor(rows, values, (5, 1), check_invariants=True)
        dense = own.to(torch.float64).to_dense()
        if dtype is torch.bool:
            dense = dense.bool()
        for op in ops(dtype)[: 2 if dtype.is_floating_point else 1]:
            result = c.allreduce(own, op, communicator=communicator)
            assert result.dtype is dtype
            expected = c.allreduce(dense, op, communicator=communicator).to(dtype)
            assert torch.equal(result.to_dense(), expected)

    crew.run(action)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool], ids=str)
def test_an_average_of_sparse_integers_is_refused_as_of_dense_ones(crew: Crew, dtype: torch.dtype) -> None:
    own = torch.eye(3).to(dtype).to_sparse()

    def action(communicator: Communicator) -> None:
        with pytest.raises(ConfigError, match=f"no average of {dtype}; sum it, or convert"):
            c.allreduce(own, communicator=communicator)

    crew.run(action)


def test_what_cannot_be_done_with_sparse_tensors_is_refused(three: Crew) -> None:
    sparse = torch.eye(3).to_sparse()
    own = three.communicators[0]
    with pytest.raises(UsageError, match="no max of sparse tensors: sum or average"):
        c.allreduce(sparse, ReduceOp.MAX, communicator=own)
    with pytest.raises(UsageError, match="only allreduce takes a sparse tensor"):
        c.broadcast(sparse, communicator=own)

    def action(communicator: Communicator) -> None:
        shape = (3, 3 + (communicator.rank == 1))
        with pytest.raises(ConfigError, match=r"shape of a sparse tensor: \[\[3, 3\], \[3, 4\], \[3, 3\]\]"):
            c.allreduce(torch.zeros(shape).to_sparse(), communicator=communicator)

    three.run(action)


# Moving tensors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_moved_arrives_as_it_was_in_every_dtype(crew: Crew, dtype: torch.dtype) -> None:
    size = crew.size

    def rows(rank: int, count: int) -> Tensor:
        return given_by(rank, dtype, count, 3)

    def action(communicator: Communicator) -> None:
        rank = communicator.rank
        whole = c.allgather(rows(rank, rank * 2), communicator=communicator)
        assert torch.equal(whole, torch.cat([rows(one, one * 2) for one in range(size)]))
        for root in range(size):
            assert torch.equal(
                c.broadcast(rows(rank, 4).t(), root, communicator=communicator), rows(root, 4).t()
            )
            gathered = c.gather(rows(rank, rank), root, communicator=communicator)
            assert (gathered is None) == (rank != root)
            for one, tensor in enumerate(gathered or []):
                assert torch.equal(tensor, rows(one, one))
            dealt = [rows(one, 2 + one) for one in range(size)] if rank == root else None
            assert torch.equal(c.scatter(dealt, root, communicator=communicator), rows(rank, 2 + rank))
        splits = [(rank + other) % 3 for other in range(size)]
        output, received = c.alltoall(rows(rank, sum(splits)), splits, communicator=communicator)
        assert received.tolist() == [(rank + other) % 3 for other in range(size)]
        pieces = [
            rows(other, sum((other + one) % 3 for one in range(size)))[
                sum((other + one) % 3 for one in range(rank)) :
            ][: (other + rank) % 3]
            for other in range(size)
        ]
        assert torch.equal(output, torch.cat(pieces))

    crew.run(action)


def test_what_has_no_dimensions_or_no_elements_is_moved_too(crew: Crew) -> None:
    def action(communicator: Communicator) -> None:
        rank, size = communicator.rank, crew.size
        scalars = c.allgather(torch.tensor(rank + 0.5), communicator=communicator)
        assert scalars.tolist() == [one + 0.5 for one in range(size)]
        gathered = c.gather(torch.tensor(rank), size - 1, communicator=communicator)
        assert gathered is None or [tensor.item() for tensor in gathered] == list(range(size))
        one = c.scatter(
            [torch.tensor(at) for at in range(size)] if rank == 0 else None, communicator=communicator
        )
        assert (one.item(), one.shape) == (rank, ())
        for shape in [(0,), (0, 3), (size, 0)]:
            empty = torch.empty(shape)
            assert c.allgather(empty, communicator=communicator).shape == (shape[0] * size, *shape[1:])
            assert c.broadcast(empty, communicator=communicator).shape == shape
            output, received = c.alltoall(empty, communicator=communicator)
            assert (output.shape, received.sum().item()) == (shape, shape[0])
            assert c.scatter([empty] * size if rank == 0 else None, communicator=communicator).shape == shape
            gathered = c.gather(empty, communicator=communicator)
            assert gathered is None or [tensor.shape for tensor in gathered] == [shape] * size

    crew.run(action)


def test_many_tensors_are_gathered_as_one_by_one(crew: Crew) -> None:
    def action(communicator: Communicator) -> None:
        rank = communicator.rank
        tensors = [torch.full((rank, 2), rank), torch.tensor(rank * 0.5), torch.ones(3, dtype=torch.bool)]
        together = c.grouped_allgather(tensors, communicator=communicator)
        for one, other in zip(together, tensors, strict=True):
            assert torch.equal(one, c.allgather(other, communicator=communicator))

    crew.run(action)


def test_the_root_of_a_scatter_may_give_each_another_shape_and_dtype(crew: Crew) -> None:
    def action(communicator: Communicator) -> Tensor:
        given = [torch.zeros([2] * rank, dtype=DTYPES[rank]) for rank in range(crew.size)]
        return c.scatter(given if communicator.rank == 0 else None, communicator=communicator)

    results = crew.run(action)
    assert [(len(result.shape), result.dtype) for result in results] == [
        (rank, DTYPES[rank]) for rank in range(crew.size)
    ]


@pytest.mark.slow
def test_sums_of_all_splits_are_what_alltoall_moves(three: Crew) -> None:
    table = st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=3, max_size=3)

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(table)
    def moves(splits: list[list[int]]) -> None:
        def action(communicator: Communicator) -> tuple[list[int], list[int]]:
            own = splits[communicator.rank]
            rows = torch.tensor([to for to, count in enumerate(own) for _ in range(count)], dtype=torch.int32)
            output, received = c.alltoall(rows, torch.tensor(own), communicator=communicator)
            return output.tolist(), received.tolist()

        for rank, (output, received) in enumerate(three.run(action)):
            assert received == [row[rank] for row in splits]
            assert output == [rank] * sum(received)

    moves()


# From one to another


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_goes_from_rank_to_rank_as_it_is(three: Crew, dtype: torch.dtype) -> None:
    def action(communicator: Communicator) -> None:
        rank = communicator.rank
        for shape in [(), (0,), (2, 3), (LARGE,)]:
            if rank == 0:
                c.send(given_by(0, dtype, *shape), 2, communicator=communicator)
            elif rank == 2:
                assert torch.equal(c.recv(0, communicator=communicator), given_by(0, dtype, *shape))

    three.run(action)


def test_all_may_send_and_receive_at_once_under_one_name(three: Crew) -> None:
    def action(communicator: Communicator) -> None:
        rank = communicator.rank
        others = [other for other in range(3) if other != rank]
        received = [c.recv_async(other, "all", communicator=communicator) for other in others for _ in (1, 2)]
        sent = [
            c.send_async(torch.tensor([rank, other, turn]), other, "all", communicator=communicator)
            for turn in (1, 2)
            for other in others
        ]
        for work in sent:
            work.wait()
        assert [work.get().tolist() for work in received] == [
            [other, rank, turn] for other in others for turn in (1, 2)
        ]

    three.run(action)


def test_transfers_are_matched_by_name_in_any_order(three: Crew) -> None:
    def action(communicator: Communicator) -> list[float]:
        if communicator.rank == 0:
            works = [
                c.send_async(torch.tensor(at), 1, at_name, communicator=communicator)
                for at, at_name in [(1.0, "a"), (2.0, "b"), (3.0, "c")]
            ]
            for work in works:
                work.wait()
        if communicator.rank == 1:
            return [c.recv(0, name, communicator=communicator).item() for name in "cab"]
        return []

    assert three.run(action)[1] == [3.0, 1.0, 2.0]


@pytest.mark.parametrize("other", [-1, 0, 3])
def test_who_sends_to_itself_or_to_nobody_is_told(three: Crew, other: int) -> None:
    communicator = three.communicators[0]
    with pytest.raises(UsageError, match=f"between rank 0 and rank {other}; allowed is any from 0 to 2"):
        c.send(torch.ones(1), other, communicator=communicator)
    with pytest.raises(UsageError, match=f"between rank {other} and rank 0"):
        c.recv(other, communicator=communicator)


# Order


def test_named_operations_may_come_in_any_order_on_every_rank(crew: Crew) -> None:
    names = list("abcdef")

    def action(communicator: Communicator) -> dict[str, float]:
        turned = names[communicator.rank :] + names[: communicator.rank]
        works = {
            name: c.allreduce_async(
                torch.tensor(float(names.index(name))), name=name, communicator=communicator
            )
            for name in turned
        }
        return {name: works[name].get().item() for name in sorted(turned, reverse=True)}

    assert crew.run(action) == [{name: float(at) for at, name in enumerate(names)}] * crew.size


def test_calls_under_one_name_may_be_under_way_together(crew: Crew) -> None:
    def action(communicator: Communicator) -> list[float]:
        works = [c.allreduce_async(torch.tensor(turn + 0.5), communicator=communicator) for turn in range(20)]
        return [work.get().item() for work in reversed(works)]

    assert crew.run(action) == [[turn + 0.5 for turn in reversed(range(20))]] * crew.size


def test_threads_of_a_rank_may_each_wait_for_their_own(three: Crew) -> None:
    def action(communicator: Communicator) -> dict[str, float]:
        results: dict[str, float] = {}

        def call(name: str) -> None:
            own = torch.tensor(float(communicator.rank + ord(name)))
            results[name] = c.allreduce(own, ReduceOp.MAX, name, communicator=communicator).item()

        names = "xyz"[communicator.rank :] + "xyz"[: communicator.rank]
        threads = [threading.Thread(target=call, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        return results

    assert three.run(action) == [{name: ord(name) + 2.0 for name in "xyz"}] * 3


def test_nobody_passes_a_barrier_before_all_have_come(crew: Crew) -> None:
    arrived: SimpleQueue[int] = SimpleQueue()

    def action(communicator: Communicator) -> int:
        arrived.put(communicator.rank)
        c.barrier_async(communicator=communicator).wait()
        return arrived.qsize()

    assert crew.run(action) == [crew.size] * crew.size


def test_who_waits_too_long_is_told_for_what_and_the_operation_goes_on(three: Crew) -> None:
    late = threading.Event()

    def action(communicator: Communicator) -> float:
        if communicator.rank == 2:
            late.wait(LIMIT)
        work = c.allreduce_async(torch.tensor(1.5), name="late", communicator=communicator)
        if communicator.rank == 0:
            with pytest.raises(DeadlineExceeded, match=r"allreduce 'late' did not finish within 0\.01 s"):
                work.wait(0.01)
            assert not work.done
            late.set()
        return float(work.get())

    assert three.run(action) == [1.5] * 3


# Disagreement


def odd(rank: int) -> dict[str, tuple[Callable[[Communicator], object], str, str]]:
    """What rank 1 does unlike the others, and what it and rank 0 are said to have sent."""
    ones, one = torch.ones, rank == 1
    return {
        "shape": (
            lambda own: c.allreduce(ones(3 if one else 2), communicator=own),
            "allreduce average float32[2]",
            "allreduce average float32[3]",
        ),
        "dtype": (
            lambda own: c.allreduce(ones(2).to(torch.float64 if one else torch.float32), communicator=own),
            "float32[2]",
            "float64[2]",
        ),
        "op": (
            lambda own: c.allreduce(ones(2), ReduceOp.MAX if one else ReduceOp.SUM, communicator=own),
            "allreduce sum",
            "allreduce max",
        ),
        "root": (
            lambda own: c.broadcast(ones(2), int(one), communicator=own),
            "broadcast from rank 0 float32[2]",
            "broadcast from rank 1",
        ),
        "broadcast": (
            lambda own: c.broadcast(ones(3 if one else 2), 2, communicator=own),
            "broadcast from rank 2 float32[2]",
            "broadcast from rank 2 float32[3]",
        ),
        "reduce": (
            lambda own: c.reduce(ones(2), int(one), communicator=own),
            "reduce average to rank 0",
            "reduce average to rank 1",
        ),
        "columns": (
            lambda own: c.allgather(ones(2, 3 if one else 2), communicator=own),
            "allgather float32[2, 2]",
            "allgather float32[2, 3]",
        ),
        "kind": (
            lambda own: (
                c.allgather(ones(2), "k", communicator=own)
                if one
                else c.allreduce(ones(2), name="k", communicator=own)
            ),
            "allreduce average float32[2]",
            "allgather float32[2]",
        ),
        "count": (
            lambda own: c.grouped_allreduce([ones(1)] * (9 if one else 8), communicator=own),
            "allreduce average 8 tensors",
            "allreduce average 9 tensors, of which number 8 is float32[1]",
        ),
        "one of many": (
            lambda own: c.grouped_allreduce([*[ones(1)] * 8, ones(2 if one else 1)], communicator=own),
            "9 tensors, of which number 8 is float32[1]",
            "9 tensors, of which number 8 is float32[2]",
        ),
        "group": (
            lambda own: c.new_group([0, 1] if one else [0, 2], communicator=own),
            "group of ranks [0, 2]",
            "group of ranks [0, 1]",
        ),
        "rows": (
            lambda own: c.alltoall(ones(3, 4 if one else 5), communicator=own),
            "alltoall float32[3, 5]",
            "alltoall float32[3, 4]",
        ),
    }


@pytest.mark.parametrize("what", list(odd(0)))
def test_ranks_that_disagree_are_all_told_who_sent_what(three: Crew, what: str) -> None:
    def action(communicator: Communicator) -> str:
        call, *_ = odd(communicator.rank)[what]
        with pytest.raises(ConfigError) as caught:
            call(communicator)
        c.barrier(communicator=communicator)  # and the others go on
        return str(caught.value)

    (text,) = set(three.run(action))
    _, usual, other = odd(0)[what]
    assert f"rank 0 sent {usual}" in text.replace("allreduce average ", "") or f"rank 0 sent {usual}" in text
    assert other in text
    assert "rank 2 sent" in text


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda own: c.alltoall(torch.ones(4), communicator=own),
            "rank 0 gave 4 rows, which do not divide by 3",
        ),
        (
            lambda own: c.alltoall(torch.ones(4), [1, 1, 2 + (own.rank == 1)], communicator=own),
            r"rank 1 splits 4 rows as \[1, 1, 3\]; give 3 counts that add up to 4",
        ),
        (
            lambda own: c.alltoall(torch.ones(4), [5, -1, 0], communicator=own),
            r"rank 0 splits 4 rows as \[5, -1, 0\]",
        ),
        (lambda own: c.alltoall(torch.ones(()), communicator=own), "rank 0 gave a tensor without dimensions"),
        (lambda own: c.reduce_scatter(torch.ones(()), communicator=own), "has no rows to deal out"),
        (
            lambda own: c.scatter([torch.ones(1)] * 2 if own.rank == 0 else None, communicator=own),
            "root 0 gave 2 tensors to scatter; give one for each of the ranks 0, 1, 2",
        ),
        (
            lambda own: own.collective(Call(Collective.BROADCAST, "none", root=1)).get(),
            "root 1 gave no tensor; ranks taking part: 0, 1, 2",
        ),
    ],
)
def test_what_cannot_be_done_is_an_error_on_every_rank(
    three: Crew, call: Callable[[Communicator], object], says: str
) -> None:
    def action(communicator: Communicator) -> None:
        with pytest.raises(ConfigError, match=says):
            call(communicator)

    three.run(action)
    three.run(action)  # nobody has fallen behind


@pytest.mark.parametrize("root", [-1, 7])
def test_a_root_that_is_no_rank_is_refused(three: Crew, root: int) -> None:
    own = three.communicators[0]
    for call in (c.broadcast, c.reduce, c.gather):
        with pytest.raises(UsageError, match=f"root is {root}; ranks are 0 to 2"):
            call(torch.zeros(1), root, communicator=own)


def test_what_does_not_travel_is_refused_on_the_root_and_on_the_others(three: Crew) -> None:
    for rank in range(3):
        with pytest.raises(UsageError, match="does not travel"):
            c.broadcast(torch.ones(1, dtype=torch.complex64), communicator=three.communicators[rank])


def test_what_others_than_the_root_give_to_scatter_counts_for_nothing(three: Crew) -> None:
    def action(communicator: Communicator) -> float:
        own = [torch.tensor(communicator.rank * 10.0 + at) for at in range(3 + communicator.rank)]
        return c.scatter(own, communicator=communicator).item()

    assert three.run(action) == [0.0, 1.0, 2.0]


def test_a_dtype_that_does_not_travel_is_refused(three: Crew) -> None:
    with pytest.raises(UsageError, match=r"torch\.complex64 does not travel; convert it to one of float64"):
        c.allreduce(torch.ones(1, dtype=torch.complex64), communicator=three.communicators[0])


# Groups


def test_a_group_does_everything_among_its_members_alone(three: Crew) -> None:
    def action(communicator: Communicator) -> None:
        rank = communicator.rank
        group = c.new_group([2, 0], communicator=communicator)
        assert (group.ranks, group.size(), group.included()) == ((0, 2), 2, rank != 1)
        if rank == 1:
            with pytest.raises(UsageError, match=r"rank 1 is none of the group of ranks \[0, 2\]"):
                c.allreduce(torch.ones(1), group=group, communicator=communicator)
            with pytest.raises(UsageError, match=r"rank 1 is none of"):
                group.rank()
        else:
            own = torch.full((2, 2), float(rank))
            assert group.rank() == rank // 2
            assert c.allreduce(own, group=group, communicator=communicator)[0, 0] == 1.0
            assert len(c.allgather(own, group=group, communicator=communicator)) == 4
            assert c.broadcast(own, 2, group=group, communicator=communicator)[0, 0] == 2.0
            assert (c.reduce(own, 2, group=group, communicator=communicator) is None) == (rank == 0)
            assert (c.gather(own, 2, group=group, communicator=communicator) is None) == (rank == 0)
            dealt = [own, own + 1] if rank == 2 else None
            assert c.scatter(dealt, 2, group=group, communicator=communicator)[0, 0] == 2 + rank // 2
            assert len(c.reduce_scatter(own, group=group, communicator=communicator)) == 1
            output, _ = c.alltoall(own, group=group, communicator=communicator)
            assert output[:, 0].tolist() == [0.0, 2.0]
            c.barrier(group=group, communicator=communicator)
            with pytest.raises(UsageError, match=r"root is 1, which is none of the group of ranks \[0, 2\]"):
                c.broadcast(own, 1, group=group, communicator=communicator)
        assert c.allreduce(torch.tensor(1.0), ReduceOp.SUM, communicator=communicator) == 3.0
        c.remove_group(group, communicator=communicator)
        with pytest.raises(UsageError, match="was removed: make a new one"):
            c.barrier(group=group, communicator=communicator)
        with pytest.raises(UsageError, match="was removed before"):
            c.remove_group(group, communicator=communicator)

    three.run(action)
    three.run(action)  # what was removed may be made again


def test_groups_that_overlap_do_not_wait_for_each_other(three: Crew) -> None:
    def action(communicator: Communicator) -> list[float]:
        rank = communicator.rank
        groups = [c.new_group(pair, communicator=communicator) for pair in ([0, 1], [1, 2], [0, 2])]
        mine = [group for group in groups if group.included()]
        if rank % 2:
            mine.reverse()
        works = {
            group.ranks: c.allreduce_async(
                torch.tensor(float(rank)), ReduceOp.SUM, group=group, communicator=communicator
            )
            for group in mine
        }
        totals = [works[ranks].get().item() for ranks in sorted(works)]
        for group in groups:
            c.remove_group(group, communicator=communicator)
        return totals

    assert three.run(action) == [[1.0, 2.0], [1.0, 3.0], [2.0, 3.0]]


def test_a_group_made_twice_is_there_until_it_is_removed_twice(three: Crew) -> None:
    def action(communicator: Communicator) -> list[float]:
        groups = [c.new_group([0, 1], communicator=communicator) for _ in range(2)]
        c.remove_group(groups[0], communicator=communicator)
        totals = []
        if communicator.rank < 2:
            own = torch.tensor(1.0)
            totals = [c.allreduce(own, ReduceOp.SUM, group=groups[1], communicator=communicator).item()]
        c.remove_group(groups[1], communicator=communicator)
        return totals

    assert three.run(action) == [[2.0], [2.0], []]


def test_what_all_have_begun_in_a_group_is_done_before_it_is_removed(three: Crew) -> None:
    def action(communicator: Communicator) -> list[float]:
        group, works = c.new_group([0, 1], communicator=communicator), []
        if group.included():
            for turn in range(20):
                own = torch.full((LARGE * 10,), float(turn))
                works.append(
                    c.allreduce_async(own, name=f"turn {turn}", group=group, communicator=communicator)
                )
        c.remove_group(group, communicator=communicator)
        return [work.get()[0].item() for work in works]

    whole = [float(turn) for turn in range(20)]
    assert three.run(action) == [whole, whole, []]


def test_a_group_of_all_and_a_group_of_one_are_groups(three: Crew) -> None:
    def action(communicator: Communicator) -> tuple[float, float]:
        everybody = c.new_group(range(3), communicator=communicator)
        alone = [c.new_group([rank], communicator=communicator) for rank in range(3)][communicator.rank]
        own = torch.tensor(float(communicator.rank))
        total = c.allreduce(own, ReduceOp.SUM, group=everybody, communicator=communicator)
        return total.item(), c.allreduce(own, ReduceOp.SUM, group=alone, communicator=communicator).item()

    assert three.run(action) == [(3.0, 0.0), (3.0, 1.0), (3.0, 2.0)]


@pytest.mark.parametrize("ranks", [[], [0, 0], [1, 3], [-1]])
def test_a_group_that_cannot_be_is_refused(three: Crew, ranks: list[int]) -> None:
    with pytest.raises(UsageError, match="name one or more different ranks, each from 0 to 2"):
        c.new_group(ranks, communicator=three.communicators[0])


# Join


@pytest.mark.slow
def test_a_rank_without_data_joins_and_the_others_go_on(crew: Crew) -> None:
    """Rank r has r + 1 batches."""
    size = crew.size

    def action(communicator: Communicator) -> tuple[list[float], list[int], int]:
        rank, totals, rows = communicator.rank, [], []
        for _ in range(rank + 1):
            totals.append(c.allreduce(torch.full((2,), 6.0), communicator=communicator)[0].item())
            rows.append(len(c.allgather(torch.ones(2, 3), communicator=communicator)))
            c.grouped_allreduce([torch.ones(LARGE), torch.tensor(1)], ReduceOp.SUM, communicator=communicator)
            c.broadcast(torch.ones(2), size - 1, communicator=communicator)
            c.barrier_async(communicator=communicator).wait()
        return totals, rows, c.join(communicator=communicator)

    for _ in range(2):
        for rank, (totals, rows, last) in enumerate(crew.run(action)):
            assert totals == [pytest.approx(6.0 * (size - step) / size) for step in range(rank + 1)]
            assert rows == [2 * (size - step) for step in range(rank + 1)]
            assert last == size - 1


def test_a_root_that_has_joined_has_nothing_to_give(three: Crew) -> None:
    def action(communicator: Communicator) -> None:
        if communicator.rank != 1:
            with pytest.raises(ConfigError, match="root 1 gave no tensor"):
                c.broadcast(torch.ones(2), 1, communicator=communicator)
        c.join(communicator=communicator)

    three.run(action)


def test_a_group_goes_on_without_a_member_that_has_joined(three: Crew) -> None:
    def action(communicator: Communicator) -> list[float]:
        group = c.new_group([0, 1], communicator=communicator)
        c.barrier(communicator=communicator)
        totals = []
        if communicator.rank == 0:
            own = torch.tensor(1.0)
            totals = [c.allreduce(own, ReduceOp.SUM, group=group, communicator=communicator).item()]
        c.join(communicator=communicator)
        c.remove_group(group, communicator=communicator)
        return totals

    assert three.run(action)[0] == [1.0]

"""Both exchanges of a group give what torch.distributed promises; the ranks are threads of one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import reduce

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hubring.ps.core.errors import ConfigError, RingBroken
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.host import meeting
from hubring.workers.communicators.host.base import GroupExchange
from hubring.workers.communicators.host.reductions import SUM, reduction
from hubring.workers.communicators.host.shared_memory import SLOT
from hubring.workers.torch_backend.exchange import HubGroupExchange
from tests.support.training.rank_pool import RankPool

ORDER = (2, 0, 1)
"""The members' ranks in the job, in the group's order."""
SIZES = (1, 1000, 5 * SLOT // 8)
"""Elements of one cache line, of a mark, and of several slots."""
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}

names = itertools.count()


class Members:
    """Three ranks that exchange in one way."""

    def __init__(self, kind: str, pool: RankPool) -> None:
        self._pool = pool
        name = f"{kind} {next(names)}"

        def connect(communicator: Communicator) -> GroupExchange:
            own = ORDER.index(communicator.rank)
            hub = HubGroupExchange(communicator, name, ORDER, own)
            if kind == "hub":
                return hub
            others = [rank for rank in ORDER if rank != communicator.rank]
            watch = meeting.Watch(communicator, name, communicator.rank, others)
            near = meeting.connect(hub.gather, name, ORDER, own, watch.lost)
            assert near is not None, "all ranks are in this process"
            return near

        self.exchanges = pool.run(connect)

    def close(self) -> None:
        for exchange in self.exchanges:
            exchange.close("the test is over")

    def run(self, action: Callable[[GroupExchange, int], object]) -> None:
        """Runs `action` once per member, with its rank in the group."""
        self._pool.run(lambda one: action(self.exchanges[one.rank], ORDER.index(one.rank)))


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool("hub", len(ORDER))
    yield pool
    pool.close()


@pytest.fixture(params=["hub", "host"])
def members(request: pytest.FixtureRequest, ranks: RankPool) -> Iterator[Members]:
    made = Members(request.param, ranks)
    yield made
    made.close()


def given(member: int, dtype: torch.dtype, size: int) -> Tensor:
    numbers = torch.randint(1, 4, (size,), generator=torch.Generator().manual_seed(member))
    return numbers.to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_reductions_agree_with_torch_in_every_dtype(members: Members, dtype: torch.dtype) -> None:
    whole = [given(member, dtype, SIZES[1]) for member in range(len(ORDER))]
    for name, op in OPS.items():
        if name.startswith("B") and dtype.is_floating_point:
            continue
        wide = torch.int64 if dtype in (torch.uint16, torch.uint32, torch.uint64) else dtype
        expected = reduce(op, [one.to(wide) for one in whole]).to(dtype)

        def action(
            exchange: GroupExchange, member: int, name: str = name, expected: Tensor = expected
        ) -> None:
            flat = whole[member].clone()
            exchange.reduce(flat, reduction(getattr(ReduceOp, name), [flat]))
            assert torch.equal(flat, expected), name

        members.run(action)


@pytest.mark.parametrize("size", SIZES)
def test_each_member_has_the_same_bits_of_a_sum(members: Members, size: int) -> None:
    inputs = [torch.randn(size, generator=torch.Generator().manual_seed(one)) for one in range(len(ORDER))]
    results: dict[int, Tensor] = {}

    def action(exchange: GroupExchange, member: int) -> None:
        for _ in range(3):
            results[member] = inputs[member].clone()
            exchange.reduce(results[member], SUM)

    members.run(action)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    torch.testing.assert_close(results[0], sum(inputs))


@pytest.mark.parametrize("size", SIZES)
def test_moves_bring_the_bytes_of_each_member(members: Members, size: int) -> None:
    data = [given(member, torch.uint8, size) for member in range(len(ORDER))]
    lengths = [[0, min(3, size), size], [size, 0, 1], [min(2, size), size, 0]]

    def action(exchange: GroupExchange, member: int) -> None:
        for root in range(len(ORDER)):
            mine = data[member].clone()
            exchange.broadcast(mine, root)
            assert torch.equal(mine, data[root])
        into = [torch.empty_like(one) for one in data]
        exchange.allgather(data[member], into)
        assert all(map(torch.equal, into, data))
        sent = [data[member][:length] for length in lengths[member]]
        received = [torch.empty(row[member], dtype=torch.uint8) for row in lengths]
        exchange.alltoall(sent, received)
        for other, one in enumerate(received):
            assert torch.equal(one, data[other][: lengths[other][member]])

    members.run(action)


def test_unlike_calls_are_refused_on_every_member(members: Members) -> None:
    def action(exchange: GroupExchange, member: int) -> None:
        flat = torch.zeros(4, dtype=torch.uint8)
        calls = (lambda: exchange.broadcast(flat, 0), lambda: exchange.reduce(flat, SUM))
        with pytest.raises((ConfigError, RingBroken), match="disagree"):
            calls[min(member, 1)]()

    members.run(action)


def test_members_of_unlike_sizes_are_refused(members: Members) -> None:
    def action(exchange: GroupExchange, member: int) -> None:
        with pytest.raises((ConfigError, RingBroken), match=r"disagree|equal sizes"):
            exchange.reduce(torch.zeros(4 + member), SUM)

    members.run(action)


def test_a_member_that_leaves_is_named_to_those_that_wait(ranks: RankPool) -> None:
    def action(exchange: GroupExchange, member: int) -> None:
        if member == 1:
            exchange.close("rank 0 left the group")
        else:
            with pytest.raises(RingBroken, match="rank 0 left the group"):
                exchange.reduce(torch.zeros(1), SUM)

    near = Members("host", ranks)
    near.run(action)
    near.close()


@pytest.mark.parametrize("name", ["BAND", "BOR", "BXOR"])
def test_bitwise_operations_refuse_floats(name: str) -> None:
    with pytest.raises(TypeError, match="needs integers"):
        reduction(getattr(ReduceOp, name), [torch.zeros(1)])
    assert reduction(getattr(ReduceOp, name), [torch.zeros(1, dtype=torch.bool)]).name == name

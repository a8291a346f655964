"""One suite for every communicator: what a script may rely on, whatever it runs on.

A harness runs one function on all ranks at once and returns what each returned.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import product
from multiprocessing import forkserver
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn

from hubring.ps.core.errors import ConfigError, DeadlineExceeded, HubringError, RingBroken, UsageError
from hubring.ps.core.messages import Call, Collective, ReduceOp
from hubring.ps.core.types import Hyper
from hubring.ps.core.work import Work
from hubring.ps.optim.hyper import hyper_of
from hubring.workers.buckets.bucketing import Bucket, make_buckets
from hubring.workers.collectives import (
    allgather,
    allreduce,
    allreduce_async,
    barrier,
    broadcast,
    recv_async,
)
from hubring.workers.collectives.broadcasts import broadcast_into
from hubring.workers.communicators.allreduce import AllreduceCommunicator, ring_store
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.hub import PSCommunicator
from hubring.workers.communicators.ring_work import RingWork
from hubring.workers.optimizer import distributed as optimizer_module
from hubring.workers.optimizer import tuning
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.support.ranks import (
    LIMIT,
    AggregatingRanks,
    HubRanks,
    LocalRanks,
    PlacedAggregatingRanks,
    PlacedRanks,
    Ranks,
    RingRanks,
    Seat,
    StagedAggregatingRanks,
    StagedRanks,
)

T = TypeVar("T")

ALL: dict[str, type[Ranks]] = {
    "local": LocalRanks,
    "ring": RingRanks,
    "hub": HubRanks,
    "aggregate": AggregatingRanks,
    "staged": StagedRanks,
    "staged aggregate": StagedAggregatingRanks,
    "placed": PlacedRanks,
    "placed aggregate": PlacedAggregatingRanks,
}

AVERAGING = ["local", "ring", "aggregate", "staged aggregate", "placed aggregate"]


def made(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = ALL[request.param]()
    yield ranks
    ranks.close()


ranks = pytest.fixture(made, params=list(ALL), name="ranks")
averaging = pytest.fixture(made, params=AVERAGING, name="averaging")
several = pytest.fixture(made, params=["ring", "hub"], name="several")
ring = pytest.fixture(made, params=["ring"], name="ring")
hub = pytest.fixture(made, params=["hub"], name="hub")


def linear(rank: int, outputs: int = 2) -> nn.Linear:
    model = nn.Linear(3, outputs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(rank + 1)
    return model


def attached(
    communicator: Communicator, model: nn.Module | None = None, bucket_bytes: int = 8
) -> list[Bucket]:
    model = model or linear(communicator.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    name = "SGD" if communicator.steps_on == "server" else ""
    buckets = make_buckets(optimizer, named, communicator.allocate, bucket_bytes, name)
    assert communicator.attach(buckets).step == 0
    return buckets


@pytest.mark.parametrize(("wired", "compress", "held"), [((), "", 1), ((0,), "", 0), ((), "powersgd:1", 0)])
def test_buckets_wait_for_each_other_only_where_none_of_them_travels(
    wired: Collection[int], compress: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HubRanks, "compress", compress)
    ranks = HubRanks()
    ranks.wired = wired
    communicator = cast(PSCommunicator, ranks.join(0))
    with communicator.together():
        assert communicator._client._lines._corked == bool(held)
    assert not communicator._client._lines._corked
    communicator.close(finished=True)
    ranks.close()


def trained(kind: type[HubRanks]) -> tuple[list[torch.Tensor], int, HubRanks]:
    """Rank 0's parameters after three steps of momentum, the bytes that it sent, and what it trained on."""

    def train(communicator: Communicator) -> tuple[list[torch.Tensor], int]:
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-0.1, 0.1, generator=generator)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = DistributedOptimizer(inner, model, communicator=communicator, bucket_bytes=1 << 20)
        before = communicator.traffic.bytes_sent
        data = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(communicator.rank))
        for batch in data:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return list(model.state_dict().values()), communicator.traffic.bytes_sent - before

    ranks = kind()
    ranks.slice_bytes = 8192  # type: ignore[misc]
    try:
        parameters, sent = ranks.run(train)[0]
    finally:
        ranks.close()
    return parameters, sent, ranks


@pytest.mark.parametrize("kind", [StagedRanks, PlacedRanks])
def test_where_buckets_and_store_are_makes_no_difference_to_the_bits(kind: type[HubRanks]) -> None:
    plain, _, _ = trained(HubRanks)
    parameters, _, _ = trained(kind)
    assert all(torch.equal(one, two) for one, two in zip(parameters, plain, strict=True))


def test_what_is_placed_does_not_travel() -> None:
    _, whole, _ = trained(HubRanks)
    _, sent, _ = trained(PlacedRanks)
    assert sent < whole / 20


def test_values_are_copied_behind_the_step_that_made_them() -> None:
    _, _, ranks = trained(PlacedRanks)
    assert isinstance(ranks, PlacedRanks)
    slices = len(ranks.shared.slices) if ranks.shared else 0
    assert ranks.memory.device.log.count("step") == 3 * slices * ranks.size


# Places and parameters


def test_ranks_are_numbered_and_know_their_number(ranks: Ranks) -> None:
    places = ranks.run(lambda communicator: (communicator.rank, communicator.size))
    assert places == [(rank, ranks.size) for rank in range(ranks.size)]


@pytest.mark.slow
def test_nobody_has_a_place_on_the_ring_before_all_are_connected(
    ring: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    gloo, opened = dist.ProcessGroupGloo, threading.Event()

    class LateByOne:
        """Rank 2 has its connections and knows it a moment later."""

        _Options, create_device = gloo._Options, gloo.create_device  # type: ignore[attr-defined]

        def __new__(cls, store: Any, rank: int, *others: Any) -> Any:
            group = gloo(store, rank, *others)
            assert rank != 2 or not opened.wait(0.5)
            return group

    monkeypatch.setattr(dist, "ProcessGroupGloo", LateByOne)
    ring.run(lambda communicator: opened.set())


def test_allocated_memory_is_flat_zeroed_and_of_its_dtype(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            memory = communicator.allocate(1000, dtype)
            assert memory.shape == (1000,)
            assert memory.dtype == dtype
            assert memory.device.type == "cpu"
            assert not memory.any()

    ranks.run(action)


def test_attaching_brings_rank_0s_parameters_to_all(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> list[list[float]]:
        return [bucket.values.tolist() for bucket in attached(communicator)]

    assert ranks.run(action) == [[[1, 1], [1] * 6]] * ranks.size


def test_buckets_come_back_with_the_mean(averaging: Ranks) -> None:
    def action(communicator: Communicator) -> None:
        buckets = attached(communicator)
        for step in range(3):
            for bucket in buckets:
                bucket.gradients.copy_(torch.arange(bucket.gradients.numel()) + communicator.rank + step)
            works = [communicator.push_pull(bucket, {}) for bucket in buckets]
            for bucket, work in zip(buckets, works, strict=True):
                work.wait(LIMIT)
                bucket.stage.arrive()
                expected = torch.arange(bucket.gradients.numel()) + (averaging.size - 1) / 2 + step
                torch.testing.assert_close(bucket.gradients, expected)
                assert work.done
                communicator.pull(bucket).wait(LIMIT)

    averaging.run(action)


def test_an_optimizer_trains_all_ranks_alike(ranks: Ranks) -> None:
    data = torch.randn(4, ranks.size, 2, 3, generator=torch.Generator().manual_seed(0))

    def train(communicator: Communicator) -> list[torch.Tensor]:
        model = linear(communicator.rank)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = DistributedOptimizer(inner, model, communicator=communicator, bucket_bytes=8)
        for step in range(4):
            optimizer.zero_grad()
            model(data[step, communicator.rank]).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    alone = linear(0)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        alone(data[step].flatten(0, 1)).square().mean().backward()
        optimizer.step()
    first, *others = ranks.run(train)
    torch.testing.assert_close(first, [parameter.detach() for parameter in alone.parameters()])
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_crossing_the_barrier_changes_no_bit(ranks: Ranks) -> None:
    def train(communicator: Communicator, cross_barrier: bool) -> list[torch.Tensor]:
        model = nn.Sequential(linear(0, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-0.5, 0.5, generator=generator)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = DistributedOptimizer(
            inner, model, communicator=communicator, bucket_bytes=64, cross_barrier=cross_barrier
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, gamma=0.9)
        data = torch.randn(8, 2, 3, generator=torch.Generator().manual_seed(communicator.rank))
        for batch in data:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            scheduler.step()
        assert optimizer._crossing is cross_barrier
        return list(model.state_dict().values())

    def ends(cross_barrier: bool) -> list[list[torch.Tensor]]:
        fresh = type(ranks)()
        try:
            return fresh.run(partial(train, cross_barrier=cross_barrier))
        finally:
            fresh.close()

    for crossed, plain in zip(ends(True), ends(False), strict=True):
        assert all(torch.equal(one, two) for one, two in zip(crossed, plain, strict=True))


def test_trying_bucket_sizes_changes_the_parameters_by_rounding_at_most(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_module, "BUCKET_BYTES", 16)
    monkeypatch.setattr(tuning, "SIZES", (200, 16, 10**6))

    def train(communicator: Communicator, bucket_bytes: int | None) -> list[torch.Tensor]:
        model = nn.Sequential(linear(0, 8), nn.Tanh(), linear_of(8, 8), nn.Tanh(), linear_of(8, 1))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, communicator=communicator, bucket_bytes=bucket_bytes)
        trying, used = _trial_of(optimizer), set()
        assert trying is (bucket_bytes is None and communicator.tunable)
        data = torch.randn(40, 2, 3, generator=torch.Generator().manual_seed(communicator.rank))
        for batch in data:
            used.add(len(optimizer._exchange._convoys))
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        assert not _trial_of(optimizer), "the trial has ended"
        assert len(used) == (3 if trying else 1), "every size was used"
        return parameters(model)

    def ends(bucket_bytes: int | None) -> list[list[torch.Tensor]]:
        fresh = type(ranks)()
        try:
            return fresh.run(partial(train, bucket_bytes=bucket_bytes))
        finally:
            fresh.close()

    first, *others = ends(None)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    torch.testing.assert_close(first, ends(16)[0])


def _trial_of(optimizer: DistributedOptimizer) -> bool:
    """Whether it is trying sizes still."""
    return optimizer._tuner is not None and optimizer._tuner._tuning is not None


class LoneOnARing(RingRanks):
    """The garbage collector runs in one thread at a time."""

    size = 1


def test_a_ring_keeps_nothing_of_models_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "BUCKET_BYTES", 16)
    monkeypatch.setattr(tuning, "SIZES", (200, 16, 10**6))

    def train(communicator: Communicator) -> weakref.ref[torch.Tensor]:
        assert isinstance(communicator, AllreduceCommunicator)
        model = nn.Sequential(linear(0, 8), nn.Tanh(), linear_of(8, 8), nn.Tanh(), linear_of(8, 1))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, communicator=communicator)
        done = False
        while not done:
            done = not _trial_of(optimizer)  # one step more, in which all that is left travels
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
        barrier(communicator=communicator)  # the ring's thread has let go of the operations before it
        gc.collect()
        used = {load for convoy in optimizer._exchange._convoys for load in convoy.loads}
        assert set(communicator._means) == {*optimizer._buckets, *used}, "nothing of sizes that were tried"
        return weakref.ref(model.get_parameter("0.weight"))

    def action(communicator: Communicator) -> bool:
        assert isinstance(communicator, AllreduceCommunicator)
        gone = train(communicator)
        barrier(communicator=communicator)
        gc.collect()
        return gone() is None and not communicator._means

    assert LoneOnARing().run(action) == [True]


def test_whatever_an_operation_fails_with_ends_all_that_wait(ring: Ranks) -> None:
    def action(communicator: Communicator) -> list[str]:
        assert isinstance(communicator, AllreduceCommunicator)

        def bad() -> None:
            raise ValueError("seven is not a codec")

        told = []
        first, second = RingWork("the first", bad), RingWork("the second")
        tensor = torch.ones(2)
        for work in (first, second):
            communicator.ring.start(work, lambda group: group.allreduce([tensor]))
        for work in (first, second):
            with pytest.raises(RingBroken, match="seven is not a codec") as raised:
                work.wait(LIMIT)
            told.append(str(raised.value))
        return told

    for told in ring.run(action):
        assert all("the first failed" in each for each in told)


def linear_of(inputs: int, outputs: int) -> nn.Linear:
    """Always the same values; torch's generator is shared by the ranks' threads."""
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(inputs))
    return layer


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


class Told(torch.autograd.Function):
    """Passes everything on, and tells when backward comes by."""

    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor, tell: Callable[[], None]) -> torch.Tensor:
        ctx.tell = tell
        return batch.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.tell()
        return gradients[0], None


def test_late_layers_are_exchanged_while_backward_of_early_ones_runs(ranks: Ranks) -> None:
    def train(communicator: Communicator) -> list[str]:
        events: list[str] = []
        push_pull = communicator.push_pull

        def told(bucket: Bucket, hyper: Hyper) -> Work:
            events.append(bucket.spec.tensors[-1].name)
            return push_pull(bucket, hyper)

        communicator.push_pull = told  # type: ignore[method-assign]
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, communicator=communicator, bucket_bytes=16)
        for _ in range(2):  # a hub watches the first
            events.clear()
            hidden = Told.apply(model[0](torch.ones(2, 3)), lambda: events.append("backward of 0"))
            model[2](model[1](hidden)).sum().backward()
            optimizer.step()
        return events

    for events in ranks.run(train):
        assert events == ["2.bias", "2.weight", "1.bias", "1.weight", "backward of 0", "0.bias", "0.weight"]


def test_ranks_with_other_models_are_told_the_first_difference(ring: Ranks) -> None:
    def action(communicator: Communicator) -> str:
        with pytest.raises(ConfigError) as caught:
            attached(communicator, linear(0, outputs=4 if communicator.rank == 1 else 2))
        return str(caught.value)

    (text,) = set(ring.run(action))
    assert "rank 1" in text
    assert "bias float32[4]" in text
    assert "bias float32[2]" in text


def test_a_rank_with_more_parameters_is_told_which(ring: Ranks) -> None:
    def action(communicator: Communicator) -> str:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1) if communicator.rank == 2 else nn.Identity())
        with pytest.raises(ConfigError) as caught:
            attached(communicator, model)
        return str(caught.value)

    (text,) = set(ring.run(action))
    assert "rank 2" in text
    assert "1.bias float32[1]" in text


def test_traffic_is_that_of_a_ring(ring: Ranks) -> None:
    def action(communicator: Communicator) -> tuple[int, int]:
        for bucket in attached(communicator):
            communicator.push_pull(bucket, {}).wait(LIMIT)
        return communicator.traffic.bytes_sent, communicator.traffic.bytes_received

    sent = sum(2 * 2 * nbytes // 3 for nbytes in (2 * 4, 6 * 4))
    assert ring.run(action) == [(sent, sent)] * 3


# Collectives


REDUCED: dict[ReduceOp, Callable[[torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: lambda parts: parts.sum(0),
    ReduceOp.AVERAGE: lambda parts: parts.mean(0),
    ReduceOp.MIN: lambda parts: parts.amin(0),
    ReduceOp.MAX: lambda parts: parts.amax(0),
    ReduceOp.PRODUCT: lambda parts: parts.prod(0),
}


def part(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([[1, 2, 3], [6, 5, 4]]).add(rank).to(dtype)


FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def test_allreduce_does_every_op_on_floating_dtypes(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> None:
        for op, dtype in product(REDUCED, FLOATS):
            given = part(communicator.rank, dtype)
            result = allreduce(given, op, communicator=communicator)
            assert torch.equal(given, part(communicator.rank, dtype))
            parts = torch.stack([part(rank, dtype) for rank in range(ranks.size)])
            torch.testing.assert_close(result, REDUCED[op](parts))

    ranks.run(action)


def test_allreduce_does_every_op_but_the_average_on_integers(ranks: Ranks) -> None:
    parts = torch.stack([part(rank, torch.int64) for rank in range(ranks.size)])

    def action(communicator: Communicator) -> None:
        for op, dtype in product([op for op in REDUCED if op is not ReduceOp.AVERAGE], INTEGERS):
            result = allreduce(part(communicator.rank, dtype), op, communicator=communicator)
            assert torch.equal(result, REDUCED[op](parts).to(dtype)), (op, dtype)

    ranks.run(action)


def test_allreduce_of_booleans_is_or_and_and(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> tuple[list[bool], list[bool]]:
        given = torch.tensor([communicator.rank == 0, True, False])
        any_of_them = allreduce(given, ReduceOp.SUM, communicator=communicator)
        all_of_them = allreduce(given, ReduceOp.PRODUCT, communicator=communicator)
        return any_of_them.tolist(), all_of_them.tolist()

    alone = ranks.size == 1
    assert ranks.run(action) == [([True, True, False], [alone, True, False])] * ranks.size


def test_an_average_of_integers_is_refused(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> None:
        with pytest.raises(ConfigError, match=r"no average of torch\.int64"):
            allreduce(torch.tensor([1]), communicator=communicator)

    ranks.run(action)


def test_shapes_are_kept(ranks: Ranks) -> None:
    last = ranks.size - 1

    def action(communicator: Communicator) -> None:
        for shape in [(), (0,), (2, 0, 3), (1, 1), (5, 2, 3)]:
            given = torch.full(shape, float(communicator.rank))
            total = allreduce(given, ReduceOp.SUM, communicator=communicator)
            assert torch.equal(total, torch.full(shape, float(sum(range(ranks.size)))))
            assert torch.equal(
                broadcast(given, last, communicator=communicator), torch.full(shape, float(last))
            )

    ranks.run(action)


def test_what_is_not_contiguous_is_taken_as_it_reads(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> None:
        given = part(communicator.rank).t()
        total = allreduce(given, ReduceOp.MAX, communicator=communicator)
        assert torch.equal(total, part(ranks.size - 1).t())

    ranks.run(action)


def test_broadcast_gives_everybody_the_roots_tensor(ranks: Ranks) -> None:
    root = ranks.size - 1

    def action(communicator: Communicator) -> None:
        for dtype in (torch.float32, torch.float16, torch.int16, torch.bool):
            result = broadcast(part(communicator.rank, dtype), root, communicator=communicator)
            assert torch.equal(result, part(root, dtype))

    ranks.run(action)


def test_broadcast_needs_a_tensor_on_the_root_alone(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> torch.Tensor | None:
        given = [part(0)] if communicator.rank == 0 else []
        work = communicator.collective(Call(Collective.BROADCAST, "from the root"), *given)
        work.wait(LIMIT)
        return work.result

    for result in ranks.run(action):
        assert result is not None
        assert torch.equal(result, part(0))


def test_a_root_that_is_no_rank_is_refused(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> None:
        for root in (-1, 7):
            with pytest.raises(UsageError, match=f"root is {root}"):
                broadcast(torch.zeros(1), root, communicator=communicator)

    ranks.run(action)


def test_broadcasting_into_tensors_of_many_dtypes_overwrites_them(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> list[torch.Tensor]:
        rank = communicator.rank
        tensors = [
            torch.tensor(rank == 0),
            torch.full((3, 2), rank + 0.5, dtype=torch.float64).t(),
            torch.tensor([rank], dtype=torch.int64),
            torch.full((3,), rank, dtype=torch.complex64),
            torch.empty(0),
        ]
        broadcast_into(tensors, communicator, "buffers", LIMIT)
        return tensors

    for tensors in ranks.run(action):
        assert tensors[0].item() is True
        assert torch.equal(tensors[1], torch.full((2, 3), 0.5, dtype=torch.float64))
        assert tensors[2].tolist() == [0]
        assert not tensors[3].any()


def test_allgather_joins_rows_of_which_ranks_may_give_unequally_many(ranks: Ranks) -> None:
    def rows(rank: int) -> torch.Tensor:
        return torch.full((rank * 2, 3), rank, dtype=torch.int16)

    expected = torch.cat([rows(rank) for rank in range(ranks.size)])
    for result in ranks.run(
        lambda communicator: allgather(rows(communicator.rank), communicator=communicator)
    ):
        assert torch.equal(result, expected)


def test_allgather_makes_scalars_rows(ranks: Ranks) -> None:
    results = ranks.run(
        lambda communicator: allgather(torch.tensor(communicator.rank + 0.5), communicator=communicator)
    )
    for result in results:
        assert result.tolist() == [rank + 0.5 for rank in range(ranks.size)]


def test_nobody_passes_a_barrier_before_all_have_come(ranks: Ranks) -> None:
    arrived: SimpleQueue[int] = SimpleQueue()

    def action(communicator: Communicator) -> int:
        arrived.put(communicator.rank)
        barrier(communicator=communicator)
        return arrived.qsize()

    assert ranks.run(action) == [ranks.size] * ranks.size


def test_names_made_in_call_order_tell_rounds_apart(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> list[float]:
        totals = [allreduce(torch.tensor(float(turn)), communicator=communicator) for turn in range(5)]
        return [total.item() for total in totals]

    assert ranks.run(action) == [[0, 1, 2, 3, 4]] * ranks.size


def calls(rank: int) -> dict[str, Callable[[Communicator], object]]:
    odd = rank == 1
    return {
        "shape": lambda c: allreduce(torch.zeros(3 if odd else 2), communicator=c),
        "dtype": lambda c: allreduce(torch.zeros(2, dtype=torch.float64 if odd else None), communicator=c),
        "op": lambda c: allreduce(torch.zeros(2), ReduceOp.MAX if odd else ReduceOp.MIN, communicator=c),
        "root": lambda c: broadcast(torch.zeros(2), 1 if odd else 0, communicator=c),
        "columns": lambda c: allgather(torch.zeros(2, 3 if odd else 2), communicator=c),
        "collective": lambda c: (
            barrier("b", communicator=c) if odd else allgather(torch.zeros(1), "b", communicator=c)
        ),
    }


@pytest.mark.parametrize("what", ["shape", "dtype", "op", "root", "columns", "collective"])
def test_ranks_that_disagree_are_all_told_who_gave_what(several: Ranks, what: str) -> None:
    def action(communicator: Communicator) -> str:
        with pytest.raises(ConfigError) as caught:
            calls(communicator.rank)[what](communicator)
        barrier(communicator=communicator)  # and the others go on
        return str(caught.value)

    (text,) = set(several.run(action))
    assert all(f"rank {rank}" in text for rank in range(several.size))


# The hub alone


def test_a_hub_steps_with_the_hyperparameters_that_come_along(hub: Ranks) -> None:
    def action(communicator: Communicator) -> None:
        buckets = attached(communicator)
        for lr in (1.0, 0.5):
            hyper = hyper_of(torch.optim.SGD([torch.zeros(1)], lr=lr).param_groups[0], "SGD")
            before = [bucket.values.clone() for bucket in buckets]
            for bucket in buckets:
                bucket.gradients.fill_(communicator.rank)
            for bucket, work in [(bucket, communicator.push_pull(bucket, hyper)) for bucket in buckets]:
                work.wait(LIMIT)
                torch.testing.assert_close(bucket.values, before[bucket.spec.index] - lr)

    hub.run(action)


def test_a_second_optimizer_on_one_hub_is_refused(hub: Ranks) -> None:
    def action(communicator: Communicator) -> None:
        attached(communicator)
        with pytest.raises(ConfigError, match="one DistributedOptimizer"):
            attached(communicator)

    hub.run(action)


def test_nobody_joins_late_where_only_the_workers_hold_the_parameters() -> None:
    ranks = AggregatingRanks()
    late = ranks.seated(Seat(ranks, 1, late=True))
    with pytest.raises(ConfigError, match="--aggregate"):
        attached(late)
    late.close(finished=False)
    ranks.close()


def test_who_joins_late_begins_where_the_shards_are() -> None:
    """The coordinator, which hears of steps by heartbeats, still takes them for at step 0."""
    ranks = HubRanks()
    ranks.see(0)
    first, late = (ranks.seated(Seat(ranks, rank, late=rank > 0)) for rank in (0, 1))
    hyper = hyper_of(torch.optim.SGD([torch.zeros(1)], lr=0.1).param_groups[0], "SGD")
    buckets = attached(first)
    for _ in range(3):
        for bucket in buckets:
            first.push_pull(bucket, hyper).wait(LIMIT)
    ranks.see(0, 1)
    model = linear(1)
    named = list(model.named_parameters())
    own = make_buckets(torch.optim.SGD(model.parameters(), lr=0.1), named, late.allocate, 8, "SGD")
    assert late.attach(own).step == 3
    for communicator in (first, late):
        communicator.close(finished=True)
    ranks.close()


# The keystone


RTOL, ATOL = 1e-5, 1e-6
"""Between one sum over the doubled batch and the mean of two means, after KEYSTONE_STEPS steps in float32."""

KEYSTONE_STEPS = 8


class TwoOnAHub(HubRanks):
    size = 2


class TwoAggregating(AggregatingRanks):
    size = 2


class TwoOnARing(RingRanks):
    size = 2


def momentum_sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


def train_two_groups(
    communicator: Communicator, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
) -> list[torch.Tensor]:
    """Weights decay and biases do not; the learning rate halves every three steps."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(communicator.rank)  # torch's own is shared by the threads
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
    groups = [
        {"params": [model[0].weight, model[2].weight], "weight_decay": 0.01},
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0, "lr": 0.02},
    ]
    optimizer = DistributedOptimizer(make(groups), model, communicator=communicator, bucket_bytes=64)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    data = torch.randn(KEYSTONE_STEPS, 2, 4, 3, generator=torch.Generator().manual_seed(1))
    for both in data:
        share = both[communicator.rank] if communicator.size == 2 else both.flatten(0, 1)
        optimizer.zero_grad()
        (model(share) - share.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("make", [momentum_sgd, adamw])
def test_hub_ring_and_one_process_end_in_the_same_parameters(make: Any) -> None:
    def ends(kind: type[Ranks]) -> list[torch.Tensor]:
        ranks = kind()
        first, *others = ranks.run(partial(train_two_groups, make=make))
        ranks.close()
        for other in others:
            assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
        return first

    alone = ends(LocalRanks)
    for kind in (TwoOnAHub, TwoAggregating, TwoOnARing):
        torch.testing.assert_close(ends(kind), alone, rtol=RTOL, atol=ATOL)
    for kind in (TwoOnAHub, TwoAggregating):
        assert all(torch.equal(one, two) for one, two in zip(ends(kind), ends(kind), strict=True))


# A ring that breaks


def test_failing_a_ring_ends_what_is_pending_and_whatever_comes_later(ring: Ranks) -> None:
    may_leave = threading.Event()

    def action(communicator: Communicator) -> None:
        assert isinstance(communicator, AllreduceCommunicator)
        buckets = attached(communicator)
        if communicator.rank != 0:
            may_leave.wait(LIMIT)
            return
        pending = communicator.push_pull(buckets[0], {})
        assert not pending.done
        communicator.fail(RingBroken("rank 1 stands still"))
        try:
            for work in (pending, communicator.push_pull(buckets[1], {})):
                with pytest.raises(RingBroken, match="rank 1 stands still"):
                    work.wait(LIMIT)
            with pytest.raises(RingBroken, match="rank 1 stands still"):
                barrier(communicator=communicator)
        finally:
            may_leave.set()

    ring.run(action)


def test_failing_a_ring_ends_the_collectives_that_wait_for_others(ring: Ranks) -> None:
    may_leave = threading.Event()

    def action(communicator: Communicator) -> None:
        assert isinstance(communicator, AllreduceCommunicator)
        if communicator.rank != 0:
            may_leave.wait(LIMIT)
            return
        works = [
            allreduce_async(torch.ones(2), communicator=communicator),
            recv_async(1, communicator=communicator),
        ]
        communicator.fail(RingBroken("rank 1 stands still"))
        try:
            for work in works:
                with pytest.raises(RingBroken, match="rank 1 stands still"):
                    work.wait(LIMIT)
        finally:
            may_leave.set()

    ring.run(action)


def test_who_leaves_a_ring_ends_what_it_has_under_way_there(ring: Ranks) -> None:
    def action(communicator: Communicator) -> None:
        barrier(communicator=communicator)
        if communicator.rank == 0:
            work = allreduce_async(torch.ones(2), communicator=communicator)
            communicator.close(finished=True)
            with pytest.raises(RingBroken, match="rank 0 has left the ring"):
                work.wait(LIMIT)

    ring.run(action)


def test_a_wait_ends_with_its_timeout(ring: Ranks) -> None:
    may_go_on = threading.Event()

    def action(communicator: Communicator) -> None:
        bucket, *_ = attached(communicator)
        if communicator.rank != 0:
            may_go_on.wait(LIMIT)
        work = communicator.push_pull(bucket, {})
        if communicator.rank == 0:
            try:
                with pytest.raises(DeadlineExceeded, match=r"bucket 0 did not finish within 0\.01 s"):
                    work.wait(0.01)
            finally:
                may_go_on.set()
        work.wait(LIMIT)

    ring.run(action)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="allowed: gloo, nccl"):
        AllreduceCommunicator(0, 1, dist.HashStore(), backend="mpi", host="127.0.0.1")  # type: ignore[attr-defined]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to reduce on")
def test_nccl_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="backend nccl"):
        AllreduceCommunicator(0, 1, dist.HashStore(), backend="nccl")  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_store_nobody_serves_is_an_error_that_names_it() -> None:
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RingBroken, match=r"rank 1 could not reach .* at 127\.0\.0\.1"):
            ring_store(1, "127.0.0.1", lambda _: None, lambda: where, 0.1)


# Ranks that are processes


def ring_rank(rank: int, board: Any, told: Any, how: str) -> None:
    """Averages once; then rank 1 dies, and rank 0 tells what it met."""
    store = ring_store(rank, "127.0.0.1", board.put, board.get, LIMIT)
    communicator = AllreduceCommunicator(rank, 2, store, timeout=LIMIT)
    (bucket,) = attached(communicator, bucket_bytes=1 << 20)
    bucket.gradients.fill_(rank)
    communicator.push_pull(bucket, {}).wait(LIMIT)
    told.put((rank, bucket.gradients.tolist()))
    if how == "leave":
        communicator.close(finished=True)
        return
    if rank == 1:
        told.close()
        told.join_thread()
        os.kill(os.getpid(), signal.SIGKILL)
    communicator.ring.operations.lost.add(1)
    try:
        if how == "die before a barrier":
            barrier(communicator=communicator)
        communicator.push_pull(bucket, {}).wait(LIMIT)
    except HubringError as error:
        told.put((type(error).__name__, str(error)))
    communicator.close(finished=False)
    told.close()
    told.join_thread()
    # As workers end: threads that a broken ring leaves in torch may abort whoever ends in good order.
    os._exit(0)


@pytest.fixture(scope="session")
def forking() -> Any:
    """Starts processes that have imported torch; what forks them stays as long as this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    forkserver.ensure_running()
    return context


@pytest.fixture
def two_processes(forking: Any) -> Iterator[Callable[[str], tuple[list[Any], Any]]]:
    board, told = forking.Queue(), forking.Queue()
    started: list[Any] = []

    def start(how: str) -> tuple[list[Any], Any]:
        started.extend(forking.Process(target=ring_rank, args=(rank, board, told, how)) for rank in (0, 1))
        for process in started:
            process.start()
        return started, told

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.mark.slow
def test_processes_meet_over_tcp_and_leave(two_processes: Any) -> None:
    processes, told = two_processes("leave")
    assert dict(told.get(timeout=60) for _ in processes) == {rank: [0.5] * 8 for rank in (0, 1)}
    for process in processes:
        process.join(LIMIT)
        assert process.exitcode == 0


@pytest.mark.slow
def test_a_killed_rank_is_noticed_at_once_and_named(two_processes: Any) -> None:
    processes, told = two_processes("die")
    assert dict(told.get(timeout=60) for _ in processes) == {rank: [0.5] * 8 for rank in (0, 1)}
    kind, text = told.get(timeout=LIMIT / 2)  # well before the ring's own timeout
    assert kind == "RingBroken"
    assert "rank 0: the exchange of bucket 0 failed, a member of the ring is gone (rank 1)" in text
    processes[0].join(LIMIT)
    assert processes[0].exitcode == 0


@pytest.mark.slow
def test_a_killed_rank_is_noticed_at_once_by_who_waits_at_a_barrier(two_processes: Any) -> None:
    processes, told = two_processes("die before a barrier")
    assert dict(told.get(timeout=60) for _ in processes) == {rank: [0.5] * 8 for rank in (0, 1)}
    kind, text = told.get(timeout=LIMIT / 2)
    assert kind == "RingBroken"
    assert "rank 0: agreeing on collectives failed, a member of the ring is gone" in text
    processes[0].join(LIMIT)
    assert processes[0].exitcode == 0

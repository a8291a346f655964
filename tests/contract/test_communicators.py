"""One suite for every communicator: what a script may rely on, whatever it runs on.

A harness runs one function on all ranks at once and returns what each returned.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn

from ps.errors import ConfigError, DeadlineExceeded, HubringError, RingBroken, UsageError
from ps.messages import Collective, ReduceOp
from workers.allreduce_communicator import AllreduceCommunicator, ring_store
from workers.bucketing import Bucket, make_buckets
from workers.collectives import allgather, allreduce, barrier, broadcast, broadcast_into
from workers.communicator import Communicator
from workers.local_communicator import LocalCommunicator
from workers.optimizer import DistributedOptimizer

T = TypeVar("T")
LIMIT = 20.0


class Ranks:
    """All ranks of one kind of communicator, each on a thread of its own."""

    size: ClassVar[int]

    def join(self, rank: int) -> Communicator:
        """Called on each rank's thread."""
        raise NotImplementedError

    def run(self, action: Callable[[Communicator], T]) -> list[T]:
        """Results in rank order; the first rank's error, if there is one."""

        def live(rank: int) -> T:
            communicator = self.join(rank)
            try:
                result = action(communicator)
            except BaseException:
                communicator.close(finished=False)
                raise
            communicator.close(finished=True)
            return result

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(live, rank) for rank in range(self.size)]
            return [future.result(LIMIT) for future in futures]


class LocalRanks(Ranks):
    size = 1

    def join(self, rank: int) -> Communicator:
        return LocalCommunicator()


class RingRanks(Ranks):
    size = 3

    def __init__(self) -> None:
        self.store = dist.HashStore()  # type: ignore[attr-defined]

    def join(self, rank: int) -> Communicator:
        return AllreduceCommunicator(rank, self.size, self.store, host="127.0.0.1", timeout=LIMIT)


@pytest.fixture(params=[LocalRanks, RingRanks], ids=["local", "ring"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    made: Ranks = request.param()
    return made


@pytest.fixture
def ring() -> RingRanks:
    return RingRanks()


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
    buckets = make_buckets(optimizer, named, communicator.allocate, bucket_bytes, "")
    assert communicator.attach(buckets).step == 0
    return buckets


# Places and parameters


def test_ranks_are_numbered_and_know_their_number(ranks: Ranks) -> None:
    places = ranks.run(lambda communicator: (communicator.rank, communicator.size))
    assert places == [(rank, ranks.size) for rank in range(ranks.size)]


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


def test_buckets_come_back_with_the_mean(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> None:
        buckets = attached(communicator)
        for step in range(3):
            for bucket in buckets:
                bucket.gradients.copy_(torch.arange(bucket.gradients.numel()) + communicator.rank + step)
            works = [communicator.push_pull(bucket, {}) for bucket in buckets]
            for bucket, work in zip(buckets, works, strict=True):
                work.wait(LIMIT)
                expected = torch.arange(bucket.gradients.numel()) + (ranks.size - 1) / 2 + step
                torch.testing.assert_close(bucket.gradients, expected)
                assert work.done
                communicator.pull(bucket).wait(LIMIT)

    ranks.run(action)


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


def test_ranks_with_other_models_are_told_the_first_difference(ring: RingRanks) -> None:
    def action(communicator: Communicator) -> str:
        with pytest.raises(ConfigError) as caught:
            attached(communicator, linear(0, outputs=4 if communicator.rank == 1 else 2))
        return str(caught.value)

    (text,) = set(ring.run(action))
    assert "rank 1" in text
    assert "bias float32[4]" in text
    assert "bias float32[2]" in text


def test_a_rank_with_more_parameters_is_told_which(ring: RingRanks) -> None:
    def action(communicator: Communicator) -> str:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1) if communicator.rank == 2 else nn.Identity())
        with pytest.raises(ConfigError) as caught:
            attached(communicator, model)
        return str(caught.value)

    (text,) = set(ring.run(action))
    assert "rank 2" in text
    assert "1.bias float32[1]" in text


def test_traffic_is_that_of_a_ring(ring: RingRanks) -> None:
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


@pytest.mark.parametrize("op", list(ReduceOp))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_allreduce_does_every_op_on_floating_dtypes(ranks: Ranks, op: ReduceOp, dtype: torch.dtype) -> None:
    parts = torch.stack([part(rank, dtype) for rank in range(ranks.size)])

    def action(communicator: Communicator) -> torch.Tensor:
        given = part(communicator.rank, dtype)
        result = allreduce(given, op, communicator=communicator)
        assert torch.equal(given, part(communicator.rank, dtype))
        return result

    for result in ranks.run(action):
        torch.testing.assert_close(result, REDUCED[op](parts))


@pytest.mark.parametrize("op", [op for op in ReduceOp if op is not ReduceOp.AVERAGE])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_allreduce_does_every_op_but_the_average_on_integers(
    ranks: Ranks, op: ReduceOp, dtype: torch.dtype
) -> None:
    parts = torch.stack([part(rank, torch.int64) for rank in range(ranks.size)])
    expected = REDUCED[op](parts).to(dtype)
    results = ranks.run(
        lambda communicator: allreduce(part(communicator.rank, dtype), op, communicator=communicator)
    )
    for result in results:
        assert torch.equal(result, expected)


def test_allreduce_of_booleans_is_or_and_and(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> tuple[list[bool], list[bool]]:
        given = torch.tensor([communicator.rank == 0, True, False])
        any_of_them = allreduce(given, ReduceOp.SUM, communicator=communicator)
        all_of_them = allreduce(given, ReduceOp.PRODUCT, communicator=communicator)
        return any_of_them.tolist(), all_of_them.tolist()

    alone = ranks.size == 1
    assert ranks.run(action) == [([True, True, False], [alone, True, False])] * ranks.size


def test_an_average_of_integers_is_refused(ring: RingRanks) -> None:
    def action(communicator: Communicator) -> None:
        with pytest.raises(ConfigError, match=r"no average of torch\.int64"):
            allreduce(torch.tensor([1]), communicator=communicator)

    ring.run(action)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 1), (5, 2, 3)])
def test_shapes_are_kept(ranks: Ranks, shape: tuple[int, ...]) -> None:
    def action(communicator: Communicator) -> None:
        given = torch.full(shape, float(communicator.rank))
        total = allreduce(given, ReduceOp.SUM, communicator=communicator)
        assert torch.equal(total, torch.full(shape, float(sum(range(ranks.size)))))
        last = ranks.size - 1
        assert torch.equal(broadcast(given, last, communicator=communicator), torch.full(shape, float(last)))

    ranks.run(action)


def test_what_is_not_contiguous_is_taken_as_it_reads(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> None:
        given = part(communicator.rank).t()
        total = allreduce(given, ReduceOp.MAX, communicator=communicator)
        assert torch.equal(total, part(ranks.size - 1).t())

    ranks.run(action)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int16, torch.bool])
def test_broadcast_gives_everybody_the_roots_tensor(ranks: Ranks, dtype: torch.dtype) -> None:
    root = ranks.size - 1
    for result in ranks.run(
        lambda communicator: broadcast(part(communicator.rank, dtype), root, communicator=communicator)
    ):
        assert torch.equal(result, part(root, dtype))


def test_broadcast_needs_a_tensor_on_the_root_alone(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> torch.Tensor | None:
        given = part(0) if communicator.rank == 0 else None
        work = communicator.collective(Collective.BROADCAST, given, name="from the root")
        work.wait(LIMIT)
        return work.result

    for result in ranks.run(action):
        assert result is not None
        assert torch.equal(result, part(0))


@pytest.mark.parametrize("root", [-1, 7])
def test_a_root_that_is_no_rank_is_refused(ranks: Ranks, root: int) -> None:
    def action(communicator: Communicator) -> None:
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
def test_ranks_that_disagree_are_all_told_who_gave_what(ring: RingRanks, what: str) -> None:
    def action(communicator: Communicator) -> str:
        with pytest.raises(ConfigError) as caught:
            calls(communicator.rank)[what](communicator)
        barrier(communicator=communicator)  # and the ring goes on
        return str(caught.value)

    (text,) = set(ring.run(action))
    assert all(f"rank {rank}: " in text for rank in range(ring.size))


# A ring that breaks


def test_failing_a_ring_ends_what_is_pending_and_whatever_comes_later(ring: RingRanks) -> None:
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


def test_a_wait_ends_with_its_timeout(ring: RingRanks) -> None:
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
        communicator.push_pull(bucket, {}).wait(LIMIT)
    except HubringError as error:
        told.put((type(error).__name__, str(error)))
    communicator.close(finished=False)


@pytest.fixture
def two_processes() -> Iterator[Callable[[str], tuple[list[Any], Any]]]:
    context = multiprocessing.get_context("spawn")
    board, told = context.Queue(), context.Queue()
    started: list[Any] = []

    def start(how: str) -> tuple[list[Any], Any]:
        started.extend(context.Process(target=ring_rank, args=(rank, board, told, how)) for rank in (0, 1))
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

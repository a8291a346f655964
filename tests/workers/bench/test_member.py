"""The bench checks what it times and counts what is wrong, step by step."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from math import prod

import pytest
import torch
from torch import Tensor

from hubring.ps.core.errors import ConnectionLost, DeadlineExceeded
from hubring.workers.bench.job import BenchJob, MemberLine
from hubring.workers.bench.member import (
    OPTIMIZERS,
    PERIOD,
    BenchMember,
    ExpectedParameters,
    FlatModel,
    RowMember,
    optimizer_of,
)
from hubring.workers.bench.raw import Bound, BoundCopy, BoundCuda, BoundOfTwo
from hubring.workers.bench.team import wrong_in
from tests.support.fakes.lazy_device import LazyDevice, LazyMark

TENSORS = [(PERIOD + 7,), (3, 5)]


class Mean(RowMember):
    """Stands for two ranks, of which this is the first; may forget the other, or a step."""

    def __init__(
        self, optimizer: str = "sgd", other: float = 1.0, forget: int | None = None, device: str = "cpu"
    ) -> None:
        super().__init__(BenchJob(shape="lone", optimizer=optimizer, size=2, directory="", device=device), 0)
        self._model = FlatModel(TENSORS)
        self._theirs = FlatModel(TENSORS)
        self._optimizer = optimizer_of(optimizer, self._model.parameters)
        self._other, self._forget = other, forget
        self._steps = 0

    def gradients(self, rank: int) -> Sequence[Tensor]:
        return self._model.gradient_parts

    def values(self) -> Sequence[Tensor]:
        return self._model.value_parts

    def step(self) -> None:
        self.check.write(self._theirs.gradient_parts, rank=1)
        self._model.gradients.add_(self._theirs.gradients, alpha=self._other).div_(2)
        self._steps += 1
        if self._steps != self._forget:
            self._optimizer.step()


Pair = tuple[MemberLine, MemberLine]


@pytest.fixture
def pair() -> Iterator[Pair]:
    lines = tuple(MemberLine(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    yield lines[0], lines[1]
    for line in lines:
        line.close()


def steps(side: RowMember, count: int) -> int:
    """Takes steps as a member does; returns how many elements are wrong."""
    for _ in range(count):
        for rank in side.ranks:
            side.check.write(side.gradients(rank), rank)
        side.step()
        side.check.advance()
    return side.check.wrong(side.values())


def after(
    steps: int, tensors: list[tuple[int]], optimizer: str = "sgd", slack: float = 0.0
) -> tuple[ExpectedParameters, FlatModel]:
    """Returns a model after some right steps of one rank, and what it must be."""
    truth, model = ExpectedParameters(optimizer, 1, slack), FlatModel(tensors)
    own = optimizer_of(optimizer, model.parameters)
    for _ in range(steps):
        truth.write(model.gradient_parts, 0)
        own.step()
        truth.advance()
    assert truth.wrong(model.value_parts) == 0
    return truth, model


# What is wrong.


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_right_mean_and_step_leave_nothing_wrong(optimizer: str) -> None:
    side = Mean(optimizer)
    assert [steps(side, 3), steps(side, 40)] == [0, 0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("fault", [{"other": 0.0}, {"other": 1.001}, {"forget": 2}, {"forget": 3}])
def test_a_lost_rank_a_slightly_wrong_mean_and_a_lost_step_make_most_elements_wrong(
    optimizer: str, fault: dict[str, float]
) -> None:
    side = Mean(optimizer, **fault)  # type: ignore[arg-type]
    assert steps(side, 3) > 0.8 * sum(prod(dims) for dims in TENSORS)


SLICE = 2**18
"""Elements; every slice, bucket and page is such a power of two."""


def one_slice_repeated(values: Tensor) -> None:
    values[SLICE : 2 * SLICE] = values[:SLICE]


def one_page_everywhere(values: Tensor) -> None:
    values.view(-1, 1024)[:] = values[:1024].clone()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("misplace", "least"), [(one_slice_repeated, SLICE), (one_page_everywhere, 4 * SLICE - 1024)]
)
def test_a_misplaced_slice_is_wrong(optimizer: str, misplace: Callable[[Tensor], None], least: int) -> None:
    truth, model = after(3, [(4 * SLICE,)], optimizer)
    misplace(model.values)
    assert truth.wrong(model.value_parts) > 0.9 * least


def test_tensors_of_one_length_in_each_others_place_are_wrong() -> None:
    truth, model = after(1, [(5000,), (5000,)])
    first, second = model.value_parts
    assert truth.wrong([first, second]) == truth.wrong([first, second, first, second]) == 0
    assert truth.wrong([second, first]) == 10_000


def test_a_compressed_row_may_be_off_by_what_rounding_gives_and_no_more() -> None:
    truth, model = after(1, [(5000,)], slack=0.02)
    largest = float(model.values.abs().max())
    model.values[:100] += 0.01 * largest
    assert truth.wrong(model.value_parts) == 0
    model.values[:100] += 0.02 * largest
    model.values[200] = float("nan")
    assert truth.wrong(model.value_parts) == 101


def test_a_tensor_longer_than_what_is_compared_at_once_is_compared_to_its_end() -> None:
    truth, model = after(1, [(600 * PERIOD + 5,)])
    model.values[-1] += 1
    model.values[300 * PERIOD] += 1
    assert truth.wrong(model.value_parts) == 2


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("bound", [Bound, BoundCopy, BoundOfTwo])
def test_a_bound_does_the_same_work_as_those_it_bounds(bound: type[Bound], size: int) -> None:
    threads = torch.get_num_threads()
    job = BenchJob(
        shape="flat", optimizer="adam", size=size, directory="", megabytes=1, slice_bytes=400 * 1024
    )
    sides = [bound(job, rank) for rank in range(bound.parts)]
    torch.set_num_threads(threads)
    assert [steps(side, 3) for side in sides] == [0] * bound.parts
    whole = 2 if bound is BoundCopy and size == 2 else 4 if bound is BoundCopy and size == 4 else 1
    assert sum(part.numel() for side in sides for part in side.values()) == whole * job.nbytes // 4


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 3])
def test_the_limit_on_a_gpu_is_right_by_the_same_calls_on_the_cpu(optimizer: str, size: int) -> None:
    job = BenchJob(shape="flat", optimizer=optimizer, size=size, directory="", megabytes=1)
    assert steps(BoundCuda(job, 0), 3) == 0


def test_untrained_parameters_and_a_missing_rank_count_as_wrong_end_to_end() -> None:
    pytest.importorskip("sklearn")
    from hubring.workers.bench.train import ReferenceTraining

    def trained(ranks: Sequence[int], steps: int) -> ReferenceTraining:
        job = BenchJob(shape="digits", optimizer="sgd", size=2, directory="")
        one = ReferenceTraining(job, ranks)
        for _ in range(steps):
            one.advance()
        return one

    reference = trained([0, 1], 3)
    count = sum(values.numel() for values in reference.values())
    assert reference.wrong(trained([0, 1], 3).values()) == 0
    assert reference.wrong(trained([0, 1], 0).values()) > 0.5 * count
    assert reference.wrong(trained([0], 3).values()) > 0.5 * count


def test_ranks_that_drifted_apart_have_a_whole_model_of_wrong_elements() -> None:
    same, other = {"wrong": 0, "digest": "a"}, {"wrong": 2, "digest": "b"}
    assert wrong_in([same, same], 100) == 0
    assert wrong_in([same, other], 100) == 102


# Orders.


class Lazy(Mean):
    """Its step runs on a device that does nothing before it is awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.device = LazyDevice()

    def step(self) -> None:
        self.device.compute("step", super().step)

    def await_device(self) -> None:
        mark = self.device.mark()
        assert isinstance(mark, LazyMark)
        mark.synchronize()


def test_members_begin_and_end_a_step_together_once_the_device_has_done_it(pair: Pair) -> None:
    bench, line = pair
    side = Lazy()
    member = threading.Thread(target=BenchMember(side, line).serve)
    member.start()
    bench.tell("2 together")
    for said, awaited in [("ready", 1), ("stepped", 2), ("ready", 3), ("stepped", 4)]:
        assert bench.hear(5) == said
        assert (len(side.device.log), len(side.device.waits)) == (awaited // 2, awaited)
        bench.tell("go")
    reply = json.loads(bench.hear(5))
    assert (len(reply["seconds"]), reply["wrong"]) == (2, 0)
    bench.tell("3 alone")
    assert len(json.loads(bench.hear(5))["seconds"]) == 3
    bench.close()
    member.join(5)
    assert not member.is_alive()


@pytest.mark.parametrize(("device", "waits"), [("cpu", 0), ("cuda", 1)])
def test_only_a_gpu_is_awaited(device: str, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(None))
    Mean(device=device).await_device()
    assert len(calls) == waits


def test_a_line_tells_of_silence(pair: Pair) -> None:
    with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
        pair[0].hear(0.01)


def test_a_line_tells_of_its_end(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(ConnectionLost):
        pair[0].hear(5)
    with pytest.raises(ConnectionLost):
        pair[0].tell("anything")

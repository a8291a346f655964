"""What a script writes into its parameters is noticed, on every transport and kernel."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from hubring.ps.core.errors import ConfigError
from hubring.ps.store.consistency import Consistency, by_name
from hubring.ps.store.parameter_memory import HostMemory, ParameterMemory
from hubring.ps.transport.base import Transport
from hubring.ps.transport.grpc.transport import GrpcTransport
from hubring.ps.transport.shm.transport import ShmTransport
from hubring.ps.transport.window import Windows
from hubring.ps.transport.written_pages import Copies, ReadCopies, ScannedCopies, WatchedCopies
from hubring.ps.transport.zmq.transport import ZmqTransport
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.bucketing import make_buckets
from hubring.workers.buckets.value_memory import ComparedValues
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.reports.training import take, values
from tests.support.fakes.lazy_device import HastyDevice
from tests.support.training.ranks import LIMIT, HubRanks, StagedRanks

FLOATS = mmap.PAGESIZE // 4
"""Elements of a page."""
SIZES = {"odd": FLOATS + 500, "tail": 2 * FLOATS, "tiny": 3, "wide": 5 * FLOATS, "last": 600}
"""No parameter but the last one registered begins at a page; `tiny` shares its page with two others."""


SLICE = 2 * mmap.PAGESIZE


class Staged(StagedRanks):
    size = 2
    slice_bytes = SLICE


class Hasty(Staged):
    device = HastyDevice


class Wired(HubRanks):
    """Two ranks whose slices are whole pages, so shared memory maps them."""

    size = 2
    slice_bytes = SLICE

    def __init__(self, kind: str, mode: str) -> None:
        self.kind, self.mode, self.wire = kind, mode, KINDS[kind]
        super().__init__()

    def consistency(self) -> Consistency:
        return by_name(self.mode)

    def parameter_memory(self) -> ParameterMemory:
        return HostMemory(self.transport.allocate)


KINDS: dict[str, type[Transport]] = {
    "shm": ShmTransport,
    "zmq": ZmqTransport,
    "grpc": GrpcTransport,
}


@pytest.fixture(params=[*(f"{kind} bsp" for kind in KINDS), "shm asp"])
def wired(request: pytest.FixtureRequest) -> Iterator[Wired]:
    kind, mode = request.param.split()
    ranks = Wired(kind, mode)
    yield ranks
    ranks.close()


class Model(nn.Module):
    """One parameter of each size."""

    def __init__(self) -> None:
        super().__init__()
        for name, numel in SIZES.items():
            self.register_parameter(name, nn.Parameter(torch.linspace(-1, 1, numel)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return sum(((each * batch).square().sum() for each in self.parameters()), torch.zeros(()))


def attached(communicator: Communicator, model: nn.Module) -> Bucket:
    named = list(model.named_parameters())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    (bucket,) = make_buckets(sgd, named, communicator.allocate, 1 << 20, "SGD", communicator.allocate_values)
    communicator.attach([bucket])
    return bucket


def step(communicator: Communicator, bucket: Bucket) -> None:
    bucket.gradients.fill_(1.0)
    work = communicator.push_pull(bucket, HYPER)
    work.wait(LIMIT)
    bucket.arrive()


HYPER = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0.0, "maximize": 0.0}

Write = Callable[[nn.Parameter, torch.Tensor], object]
"""Changes a parameter, given a view of it that was kept from before the first step."""

WRITES: dict[str, Write] = {
    "data": lambda parameter, _: parameter.data.mul_(2),
    "numpy": lambda parameter, _: parameter.detach().numpy().fill(7),
    "a kept view": lambda _, view: view[:1].fill_(5),
    "the last element": lambda parameter, _: parameter.data[-1:].fill_(9),
    "native code": lambda parameter, _: ctypes.memset(parameter.data_ptr(), 77, 1),
    "no_grad": lambda parameter, _: nn.init.constant_(parameter, 3),
}


def check_writes(communicator: Communicator) -> None:
    model = Model()
    bucket = attached(communicator, model)
    assert bucket.written() == []
    views = [parameter.data.view(-1) for parameter in bucket.parameters]
    for write in WRITES.values():
        for position, parameter in enumerate(bucket.parameters):
            landed = bucket.landing.clone()
            write(parameter, views[position])
            assert bucket.written() == bucket.written() == [position]
            assert torch.equal(bucket.landing, landed)
            changed = parameter.detach().clone()
            assert not torch.equal(changed.view(-1), landed[span(bucket, position)])
            step(communicator, bucket)
            assert torch.equal(bucket.values, bucket.landing)
            assert not torch.equal(bucket.landing, landed)
            assert bucket.written() == []
    for parameter in bucket.parameters[1::2]:
        parameter.data.neg_()
    assert bucket.written() == [1, 3]
    bucket.arrive()
    assert bucket.written() == []
    assert torch.equal(bucket.values, bucket.landing)
    bucket.values.copy_(bucket.landing)
    assert bucket.written() == [], "a write that changes nothing is no change"


def span(bucket: Bucket, position: int) -> slice:
    start = sum(parameter.numel() for parameter in bucket.parameters[:position])
    return slice(start, start + bucket.parameters[position].numel())


def test_each_write_is_reported_for_its_parameter_until_the_next_answer_arrives(wired: Wired) -> None:
    wired.run(check_writes)


COPIES: list[type[Copies]] = [WatchedCopies, ScannedCopies, ReadCopies, Copies]


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("wired", ["shm bsp", "zmq bsp"], indirect=True)
def test_a_write_is_detected_with_every_kernel_facility(
    wired: Wired, copies: type[Copies], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        made = copies()
    except OSError as error:
        pytest.skip(f"this kernel has no {copies.__name__}: {error}")
    monkeypatch.setattr(Windows, "_copies", made)
    wired.run(check_writes)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters lie in memory as on a GPU."""
    monkeypatch.setattr(
        "hubring.workers.communicators.hub.PSCommunicator.allocate_values",
        lambda _, numel, dtype, device: ComparedValues(numel, dtype, device),
    )


@pytest.mark.usefixtures("compared")
def test_a_write_is_detected_on_a_device_staged_through_the_host() -> None:
    Staged.run_once(check_writes)


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("writes", [False, True])
def test_an_answer_that_lands_before_step_is_no_change_and_hides_none(writes: bool) -> None:
    def train(communicator: Communicator) -> None:
        model = Model()
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-3), model, communicator=communicator
        )
        reducer = optimizer._trained.reducer
        for number in range(3):
            optimizer.zero_grad()
            model(torch.ones(1)).backward()
            for sent in reducer.exchange._under_way:
                sent.work.wait(LIMIT)
            assert len(reducer.exchange._under_way) == (number > 0)
            if writes and number == 2:
                bucket = reducer.buckets[0]
                assert not torch.equal(bucket.landing, bucket.values)
                bucket.parameters[0].data.mul_(2)
            optimizer.step()

    refused = pytest.raises(ConfigError, match="changes parameters between backward and step")
    with refused if writes else nullcontext():
        Hasty.run_once(train)


@pytest.mark.slow
def test_plain_training_reports_nothing_and_changes_as_in_one_process(wired: Wired) -> None:
    batches = torch.linspace(0.1, 1, 8)

    def train(communicator: Communicator) -> list[torch.Tensor]:
        model = Model()
        inner = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        optimizer = DistributedOptimizer(inner, model, communicator=communicator, bucket_bytes=16 << 10)
        for batch in batches:
            optimizer.zero_grad()
            model(batch).backward()
            assert not any(bucket.written() for bucket in optimizer._trained.reducer.buckets)
            optimizer.step()
        return values(model)

    ends = wired.run(train)
    if wired.mode != "bsp":
        return
    alone = Model()
    sgd = torch.optim.SGD(alone.parameters(), lr=1e-3, momentum=0.9)
    for batch in batches:
        take(sgd, alone(batch))
    for end in ends:
        torch.testing.assert_close(end, values(alone))

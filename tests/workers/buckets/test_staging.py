"""The order in which a bucket travels between its device and the wire."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError, HubringError
from hubring.ps.core.work import Work
from hubring.ps.transport.shm.transport import ShmTransport
from hubring.workers.buckets.staging import DeviceWaiter, Staging, ThroughHost, starts_at_page
from tests.support.fakes.lazy_device import LazyDevice

SOON = 10.0


class Wire:
    """An exchange that waits until it is told to answer."""

    def __init__(self, stage: ThroughHost) -> None:
        self.stage = stage
        self.work = Work("the exchange on the wire")
        self.sent: list[list[float]] = []
        self.begun = threading.Event()

    def start(self) -> Work:
        self.sent.append(self.stage.gradients.tolist())
        self.begun.set()
        return self.work

    def answer(self, into: Tensor, value: float) -> None:
        assert self.begun.wait(SOON)
        into.fill_(value)
        self.work.complete_part()


@pytest.fixture
def device() -> LazyDevice:
    return LazyDevice()


@pytest.fixture
def waiter() -> Iterator[DeviceWaiter]:
    waiter = DeviceWaiter()
    yield waiter
    waiter.end()


@pytest.fixture
def stage(device: LazyDevice, waiter: DeviceWaiter) -> ThroughHost:
    return ThroughHost(torch.zeros(2), torch.zeros(2), device, waiter, _plain)


def _plain(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype)


def test_handing_over_waits_neither_for_the_device_nor_for_the_wire(
    device: LazyDevice, stage: ThroughHost
) -> None:
    finish_backward = threading.Event()
    device.compute("backward", lambda: finish_backward.wait(SOON))
    wire = Wire(stage)
    work = stage.push_pull("one", wire.start, "values")
    assert not work.done
    assert wire.sent == []
    finish_backward.set()
    wire.answer(stage.values, 1)
    work.wait(SOON)
    stage.arrive()
    assert {thread for thread, _ in device.waits} == {"device waiter"}


def test_an_answer_is_not_copied_in_before_it_is_here(device: LazyDevice, stage: ThroughHost) -> None:
    wire = Wire(stage)
    work = stage.push_pull("one", wire.start, "values")
    assert wire.begun.wait(SOON)
    device.landed().synchronize()
    assert "copy in" not in device.log
    wire.answer(stage.values, 1)
    work.wait(SOON)


def test_a_pull_overwrites_nothing_that_is_still_read(device: LazyDevice, stage: ThroughHost) -> None:
    values = stage._there["values"]
    wire = Wire(stage)
    work = stage.push_pull("one", wire.start, "values")
    wire.answer(stage.values, 5)
    work.wait(SOON)
    stage.arrive()
    read: list[list[float]] = []
    device.compute("evaluation", lambda: read.append(values.tolist()))
    pulled = Wire(stage)
    work = stage.pull("two", pulled.start)
    pulled.answer(stage.values, 6)  # the host's side of the last answer is overwritten here
    work.wait(SOON)
    stage.arrive()
    assert device.look(values).tolist() == [6, 6]
    assert read == [[5, 5]]


def test_buckets_are_handed_over_in_order(device: LazyDevice, waiter: DeviceWaiter) -> None:
    begun: list[int] = []
    stages = [ThroughHost(torch.zeros(1), torch.zeros(1), device, waiter, _plain) for _ in range(4)]

    def start(index: int) -> Work:
        begun.append(index)
        return Work("done", 0)

    works = [
        stage.push_pull("one", lambda index=index: start(index), "values")  # type: ignore[misc]
        for index, stage in enumerate(stages)
    ]
    for work in works:
        work.wait(SOON)
    assert begun == [0, 1, 2, 3]


@pytest.mark.parametrize("begins", [True, False])
def test_an_exchange_that_fails_or_cannot_begin_fails_its_work(stage: ThroughHost, begins: bool) -> None:
    def start() -> Work:
        error = HubringError("the shard is gone")
        if not begins:
            raise error
        wire = Work("the exchange on the wire")
        wire.fail(error)
        return wire

    with pytest.raises(HubringError, match="the shard is gone"):
        stage.push_pull("one", start, "values").wait(SOON)


def test_the_waiter_ends_with_its_stages() -> None:
    before = set(threading.enumerate())
    waiter = DeviceWaiter()
    (thread,) = set(threading.enumerate()) - before
    del waiter
    gc.collect()
    thread.join(SOON)
    assert not thread.is_alive()


def test_other_devices_are_refused_by_name() -> None:
    tensor = torch.zeros(1, device="meta")
    with pytest.raises(ConfigError, match="parameters are on meta; only cpu and cuda"):
        Staging(_plain).stage(tensor, tensor)


def test_memory_of_segments_is_pinned_where_it_lies_and_what_shares_a_page_is_not() -> None:
    segment = torch.frombuffer(ShmTransport().allocate(4096), dtype=torch.uint8)
    assert starts_at_page(segment)
    assert not starts_at_page(segment[64:])
    assert not starts_at_page(segment[:0])

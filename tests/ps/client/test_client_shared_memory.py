"""Parameters that a shard shows: a worker's KVClient and a ShardLoop over shared memory, in one process."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from hubring.ps.client.requests import MAX_LOSSES
from hubring.ps.core.errors import ConnectionLost
from hubring.ps.core.types import Member, View
from hubring.ps.core.work import Work
from hubring.ps.store.consistency import BSP
from hubring.ps.store.parameter_memory import HostMemory
from hubring.ps.transport.base import Connection
from hubring.ps.transport.shm.transport import ShmTransport
from hubring.ps.transport.window import Windows
from tests.support.transports.one_shard import SOON, OneShard, push

NUMEL = 1 << 16


class Worker:
    """One rank, with its parameters in a window."""

    def __init__(self, shard: OneShard, rank: int) -> None:
        self.lines: list[Connection] = []
        transport = ShmTransport()
        self.client = shard.client(rank, self._note, transport)
        self.client.wait_connected(SOON)
        self.window = transport.window(4 * NUMEL)
        self.values = torch.frombuffer(self.window.landing, dtype=torch.float32)
        self.seen = torch.frombuffer(self.window.seen, dtype=torch.float32)
        self.gradients = torch.frombuffer(transport.allocate(4 * NUMEL), dtype=torch.float32).fill_(1.0)

    def _note(self, line: Connection) -> Connection:
        self.lines.append(line)
        return line

    def init(self) -> Work:
        work = Work("init")
        self.client.init(0, 0, torch.zeros(NUMEL), work)
        return work

    def pull(self) -> None:
        work = Work("pull")
        self.client.pull(0, 0, self.values, work)
        work.wait(SOON)

    def push(self) -> Work:
        return push(self.client, self.gradients, self.values, attended=False)

    def sees(self, value: float) -> bool:
        return bool((self.seen == value).all()) and bool((self.values == value).all())


@pytest.fixture
def shard() -> Iterator[OneShard]:
    transport = ShmTransport(guarded=True)
    with closing(OneShard(BSP(), 2, transport, NUMEL, HostMemory(transport.allocate))) as shard:
        yield shard


@pytest.fixture
def pair(shard: OneShard) -> list[Worker]:
    """Both ranks, their parameters zero."""
    workers = [Worker(shard, rank) for rank in range(2)]
    workers[0].init().wait(SOON)
    for worker in workers:
        worker.pull()
    return workers


def test_parameters_are_the_shards_own_memory(shard: OneShard, pair: list[Worker]) -> None:
    shard.tell(lambda: shard.loop.store._entries[0].values.fill_(5.0))
    assert all(worker.sees(5.0) for worker in pair), "the answer was copied"


def test_a_line_that_breaks_keeps_what_it_showed(pair: list[Worker]) -> None:
    for work in [worker.push() for worker in pair]:
        work.wait(SOON)
    pair[0].lines[0]._doorbell.hang_up()  # type: ignore[attr-defined]
    for work in [worker.push() for worker in pair]:
        work.wait(SOON)
    assert len(pair[0].lines) == 2
    assert all(worker.sees(2.0) for worker in pair)


def test_where_the_kernel_refuses_to_show_parameters_they_are_copied(
    shard: OneShard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "mmap failed")

    caplog.set_level(logging.WARNING)
    shard.tell(lambda: shard.loop.send(shard.loop.store.on_view(View(2, (Member(0, 1),)))))
    worker = Worker(shard, 0)
    worker.init().wait(SOON)
    monkeypatch.setattr(Windows, "_map", refuse)
    worker.pull()
    for step in range(3):
        assert worker.sees(step)
        worker.push().wait(SOON)
    assert len(worker.lines) == 1
    refusals = [record for record in caplog.records if "refused to map" in record.message]
    assert len(refusals) == 1


def test_a_line_that_breaks_each_time_is_given_up(shard: OneShard, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object) -> list[object]:
        raise ConnectionLost("it said something odd")

    worker = Worker(shard, 0)
    monkeypatch.setattr("hubring.ps.transport.shm.transport.ShmConnection.receive", broken)
    with pytest.raises(ConnectionLost, match=rf"broke {MAX_LOSSES} times.*it said something odd"):
        worker.init().wait(SOON)

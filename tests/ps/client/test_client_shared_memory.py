"""Parameters that a shard shows: a worker's KVClient and a ShardLoop over shared memory, in one process."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from hubring.ps.client.client import KVClient
from hubring.ps.client.losses import MAX_LOSSES
from hubring.ps.core.errors import ConnectionLost
from hubring.ps.core.types import BucketSpec, Member, Sender, Slice, TensorSpec, View
from hubring.ps.core.work import Work
from hubring.ps.shard.loop import ShardLoop
from hubring.ps.store.consistency import BSP
from hubring.ps.store.parameter_memory import HostMemory
from hubring.ps.transport.base import Connection
from hubring.ps.transport.shm import memory_map
from hubring.ps.transport.shm.transport import ShmTransport

PATIENCE = 10.0
NUMEL = 1 << 16
HYPER = {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0.0, "maximize": 0.0}
RANKS = (Sender(0, 1), Sender(1, 2))


class Shard:
    """One shard on a thread of its own, which holds one key of plain SGD for two ranks."""

    def __init__(self) -> None:
        transport = ShmTransport(guarded=True)
        listener = transport.listen("here")
        self.address = listener.address
        self.loop = ShardLoop(BSP(), [listener], HostMemory(transport.allocate))
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()
        bucket = BucketSpec(0, "float32", 0, "SGD", (TensorSpec("w", (NUMEL,)),))
        self.seat(1, *RANKS)
        self.loop.command(lambda: self.loop.store.assign([Slice(0, 0, 0, NUMEL, 0)], [bucket])).result(
            PATIENCE
        )

    def seat(self, epoch: int, *ranks: Sender) -> None:
        view = View(epoch, tuple(Member(*sender) for sender in ranks))
        self.loop.command(lambda: self.loop.send(self.loop.store.on_view(view))).result(PATIENCE)
        self.loop.command(self._flush).result(PATIENCE)

    def _flush(self) -> None:
        for listener in self.loop._listeners:
            listener.flush()

    def write(self, value: float) -> None:
        """Changes the parameters, and tells nobody."""
        (entry,) = self.loop.store._entries.values()
        self.loop.command(lambda: entry.values.fill_(value)).result(PATIENCE)

    def close(self) -> None:
        self.loop.stop()
        self.thread.join(PATIENCE)


class Worker:
    """One rank, with its parameters in a window."""

    def __init__(self, shard: Shard, sender: Sender) -> None:
        transport = ShmTransport()
        self.lines: list[Connection] = []
        self._dial = lambda _: transport.dial(shard.address, PATIENCE)
        self.client = KVClient(sender, 1, self.dial)
        self.client.wait_connected(PATIENCE)
        self.window = transport.window(4 * NUMEL)
        self.values = torch.frombuffer(self.window.landing, dtype=torch.float32)
        self.seen = torch.frombuffer(self.window.seen, dtype=torch.float32)
        self.gradients = torch.frombuffer(transport.allocate(4 * NUMEL), dtype=torch.float32)

    def dial(self, shard: int) -> Connection:
        self.lines.append(self._dial(shard))
        return self.lines[-1]

    def give(self, value: float) -> None:
        work = Work("init")
        self.client.init(0, 0, torch.full((NUMEL,), value), work)
        work.wait(PATIENCE)

    def pull(self) -> None:
        work = Work("pull")
        self.client.pull(0, 0, self.values, work)
        work.wait(PATIENCE)

    def push(self, value: float) -> Work:
        work = Work("push")
        self.gradients.fill_(value)
        self.client.push_pull(0, 0, self.gradients, self.values, HYPER, work)
        return work

    def sees(self, value: float) -> bool:
        return bool((self.seen == value).all()) and bool((self.values == value).all())

    def close(self) -> None:
        self.client.close()


@pytest.fixture
def shard() -> Iterator[Shard]:
    with closing(Shard()) as shard:
        yield shard


@pytest.fixture
def pair(shard: Shard) -> Iterator[list[Worker]]:
    """Both ranks, their parameters zero."""
    workers = [Worker(shard, sender) for sender in RANKS]
    workers[0].give(0.0)
    for worker in workers:
        worker.pull()
    yield workers
    for worker in workers:
        worker.close()


def test_parameters_are_the_shards_own_memory(shard: Shard, pair: list[Worker]) -> None:
    shard.write(5.0)
    assert all(worker.sees(5.0) for worker in pair), "the answer was copied"


def test_first_values_travel_from_where_they_lie(shard: Shard) -> None:
    with closing(Worker(shard, RANKS[0])) as worker:
        worker.values.fill_(3.0)
        work = Work("init")
        worker.client.init(0, 0, worker.values, work)
        work.wait(PATIENCE)
        assert not worker.lines[0]._bounces  # type: ignore[attr-defined]
        worker.pull()
        assert worker.sees(3.0)


def test_who_has_left_keeps_the_parameters_of_its_last_step(shard: Shard, pair: list[Worker]) -> None:
    leaver, stayer = pair
    for work in [worker.push(1.0) for worker in pair]:
        work.wait(PATIENCE)
    ahead = stayer.push(1.0)  # closes its round as soon as the other is out of the view
    leaver.close()
    shard.seat(2, RANKS[1])
    ahead.wait(PATIENCE)
    assert stayer.sees(-2.0)
    assert leaver.sees(-1.0)


def test_a_line_that_breaks_keeps_what_it_showed(shard: Shard, pair: list[Worker]) -> None:
    for work in [worker.push(1.0) for worker in pair]:
        work.wait(PATIENCE)
    pair[0].lines[0]._doorbell.hang_up()  # type: ignore[attr-defined]
    for work in [worker.push(1.0) for worker in pair]:
        work.wait(PATIENCE)
    assert len(pair[0].lines) == 2
    assert all(worker.sees(-2.0) for worker in pair)


def test_where_the_kernel_refuses_to_show_parameters_they_are_copied(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "mmap failed")

    with closing(Worker(shard, RANKS[0])) as worker, caplog.at_level(logging.WARNING):
        shard.seat(2, RANKS[0])
        worker.give(0.0)
        monkeypatch.setattr(memory_map, "show", refuse)
        worker.pull()
        for step in range(3):
            assert worker.sees(-step)
            worker.push(1.0).wait(PATIENCE)
        assert len(worker.lines) == 1
    refusals = [record for record in caplog.records if "refused to map" in record.message]
    assert len(refusals) == 1


def test_a_line_that_breaks_each_time_is_given_up(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Worker(shard, RANKS[0])) as worker:

        def broken(self: object) -> list[object]:
            raise ConnectionLost("it said something odd")

        monkeypatch.setattr("hubring.ps.transport.shm.connection.ShmConnection.receive", broken)
        work = Work("init")
        worker.client.init(0, 0, torch.zeros(NUMEL), work)
        with pytest.raises(ConnectionLost, match=rf"broke {MAX_LOSSES} times.*it said something odd"):
            work.wait(PATIENCE)

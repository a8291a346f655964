"""Workers of a hub add their gradients on their host, and push each sum once: the hub's promises hold."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

import pytest
import torch
from torch import Tensor, nn

from hubring.ps.core.errors import HubringError, RingBroken
from hubring.ps.core.types import Sender
from hubring.ps.transport.base import Transport
from hubring.ps.transport.grpc.transport import GrpcTransport
from hubring.ps.transport.shm.transport import ShmTransport
from hubring.ps.transport.zmq.transport import ZmqTransport
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.host import meeting
from hubring.workers.communicators.host_level import HostLevel, _Load
from hubring.workers.communicators.hub import PSCommunicator
from tests.contract.models import attached
from tests.support.store import ADD
from tests.support.training.ranks import LIMIT, Seat, TwoLevelRanks

STEPS = 4


class TwoLevels(TwoLevelRanks):
    """Two hosts of two workers."""

    size = 4
    slice_bytes = 1 << 14
    hosts = "aabb"


class UnevenHosts(TwoLevels):
    """One of three workers, and one of one."""

    hosts = "aaab"


class OneLevel(TwoLevels):
    def host_of(self, rank: int) -> str:
        return ""


def model() -> nn.Module:
    """It has buckets of three parameters and of one; some are too large for one message on a host."""
    return nn.ParameterList(torch.zeros(numel) for numel in (9000, 40000, 5, 20000, 300))


def gradient(rank: int, step: int, numel: int) -> Tensor:
    """Whole numbers, so that no sum is rounded."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(-8, 8, (numel,), generator=generator).float()


def train(
    communicator: Communicator,
    steps: range = range(STEPS),
    before: Callable[[int], object] = lambda step: None,
    absent: Callable[[int, int], frozenset[int]] = lambda rank, index: frozenset(),
    backwards: bool = False,
    start: int = 0,
) -> list[object]:
    """Returns what each step has left: the flat parameters or means, and what is absent everywhere."""
    buckets, left = attached(communicator, model(), 1 << 17, start), list[object]()
    for step in steps:
        before(step)
        works = []
        for bucket in reversed(buckets) if backwards else buckets:
            bucket.gradients.copy_(gradient(communicator.rank, step, bucket.gradients.numel()))
            bucket.absent = absent(communicator.rank, bucket.spec.index)
            hyper = ADD if communicator.steps_on == "server" else {"step": float(step)}
            works.append(communicator.push_pull(bucket, hyper))
        for work in works:
            work.wait(LIMIT)
        for bucket in buckets:
            on_worker = communicator.steps_on == "worker"
            left.append((bucket.gradients if on_worker else bucket.landing).tolist())
            left.append(sorted(bucket.absent) if on_worker else [])
    return left


def of(kind: type[TwoLevels], wire: type[Transport] = ZmqTransport, **how: object) -> type[TwoLevels]:
    return type(kind.__name__, (kind,), {"wire": wire, **how})


@pytest.mark.slow
@pytest.mark.parametrize("aggregate", [False, True], ids=["hub steps", "workers step"])
@pytest.mark.parametrize("hosts", [TwoLevels, UnevenHosts])
@pytest.mark.parametrize("wire", [ZmqTransport, GrpcTransport, ShmTransport])
def test_two_levels_train_as_one(wire: type[Transport], hosts: type[TwoLevels], aggregate: bool) -> None:
    def lacks(rank: int, index: int) -> frozenset[int]:
        lacking = [{0, 1} if rank < 3 else {1, 2}, {0} if rank < 2 else (), {0}]
        return frozenset(lacking[index])

    expected = of(OneLevel, wire, aggregate=aggregate).run_once(lambda one: train(one, absent=lacks))
    assert of(hosts, wire, aggregate=aggregate).run_once(lambda one: train(one, absent=lacks)) == expected


def test_a_hosts_link_carries_the_model_once_a_step() -> None:
    def sent(communicator: Communicator) -> int:
        train(communicator)
        return communicator.traffic.bytes_sent

    _, _, *second = TwoLevels.run_once(sent)
    model_bytes = 4 * sum(parameter.numel() for parameter in model().parameters())
    assert STEPS * model_bytes <= sum(second) < 1.01 * STEPS * model_bytes


@pytest.mark.parametrize("aggregate", [False, True], ids=["hub steps", "workers step"])
@pytest.mark.parametrize("phase", ["adds", "pushed", "answered"])
def test_no_gradient_counts_twice_when_a_member_dies(
    monkeypatch: pytest.MonkeyPatch, phase: str, aggregate: bool
) -> None:
    """Each slice of its last gradient counts for all or for none, and training goes on without it."""
    ranks = of(TwoLevels, aggregate=aggregate)()
    armed = threading.Event()

    def dies(level: HostLevel, load: _Load, now: str) -> None:
        if armed.is_set() and now == phase and level._client.sender.rank == 1 and load.index == 1:
            level._client.close()
            level._end(RingBroken("killed"))
            ranks.see(0, 2, 3)

    def add(level: HostLevel, load: _Load) -> None:
        dies(level, load, "adds")
        adds(level, load)
        dies(level, load, "pushed")

    def give(level: HostLevel, load: _Load) -> None:
        assert load.mine is not None
        load.mine.wait(LIMIT)
        dies(level, load, "answered")
        returns(level, load)

    adds, returns = HostLevel._add, HostLevel._return
    monkeypatch.setattr(HostLevel, "_add", add)
    monkeypatch.setattr(HostLevel, "_return", give)
    begun = threading.Barrier(4, armed.set, LIMIT)

    def action(communicator: Communicator) -> list[object] | None:
        try:
            return train(communicator, before=lambda step: begun.wait() if step == 1 else None)
        except HubringError:
            assert communicator.rank == 1
            return None

    first, lost, *others = ranks.run(action)
    ranks.close()
    assert lost is None
    assert others == [first, first]
    assert first is not None
    values = [torch.tensor(one) for one in first[::2]]
    for index, numel in enumerate(len(one) for one in values[:3]):
        before = torch.zeros(numel)
        for step in range(STEPS):
            whole = torch.stack([gradient(rank, step, numel) for rank in range(4)])
            means = [whole.mean(0)] if step < 1 else [whole[[0, 2, 3]].mean(0)]
            means += [whole.mean(0)] if step == 1 and (phase != "adds" or index == 0) else []
            came = values[3 * step + index] - before
            counts = [torch.isclose(came, mean, atol=1e-4) for mean in means]
            assert torch.stack(counts).any(0).all(), (step, index)
            before = torch.zeros(numel) if aggregate else values[3 * step + index]


@pytest.mark.parametrize("fault", ["_dial", "_listen"])
def test_workers_that_cannot_connect_push_their_own(
    monkeypatch: pytest.MonkeyPatch, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    working, calls = getattr(meeting, fault), count()

    def fails_once(*given: object) -> object:
        if threading.current_thread().name != "workers on one host" and next(calls) == 1:
            raise OSError
        return working(*given)

    expected = OneLevel.run_once(train)
    monkeypatch.setattr(meeting, fault, fails_once)
    assert TwoLevels.run_once(train) == expected
    assert "--local has no effect for ranks" in caplog.text


def test_a_worker_alone_on_its_host_says_that_it_pushes_its_own(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        UnevenHosts.run_once(lambda communicator: train(communicator, range(1)))
    assert caplog.text.count("--local has no effect for rank") == 1
    assert "rank 3: it shares its host with no other worker" in caplog.text


def test_ranks_of_a_host_that_send_in_other_orders_push_their_own() -> None:
    expected = OneLevel.run_once(train)
    assert TwoLevels.run_once(lambda one: train(one, backwards=one.rank == 1)) == expected


def test_a_rank_without_a_batch_need_not_change_what_the_others_change() -> None:
    def action(communicator: Communicator) -> object:
        bucket, *_ = attached(communicator, model(), 1 << 17)
        everything = frozenset(range(len(bucket.spec.tensors)))
        for step in range(2):
            if step == 1 and communicator.rank == 1:
                bucket.absent = everything
            elif step == 1:
                assert communicator.stepping_hub is not None
                bucket.values.fill_(7)
                communicator.stepping_hub.write_parameters(bucket, everything)
            bucket.gradients.fill_(4 * (not bucket.absent))
            communicator.push_pull(bucket, ADD).wait(LIMIT)
        return bucket.landing.tolist()

    assert TwoLevels.run_once(action) == OneLevel.run_once(action)


def test_a_worker_can_leave_while_its_sum_waits_for_other_hosts() -> None:
    left = threading.Barrier(4, timeout=LIMIT)

    def action(communicator: Communicator) -> None:
        bucket, *_ = attached(communicator, model(), 1 << 17)
        if communicator.rank < 2:
            work = communicator.push_pull(bucket, ADD)
            communicator.close(finished=False)
            with pytest.raises(HubringError):
                work.wait(LIMIT)
        left.wait()

    TwoLevels.run_once(action)


def test_a_joiner_pushes_its_own_beside_the_sums() -> None:
    ranks, joined = TwoLevels(), threading.Event()
    ranks.see(0, 1, 2)

    def let_in() -> None:
        ranks.see(0, 1, 2, 3)
        joined.set()

    ended = threading.Barrier(3, let_in, LIMIT)

    def action(communicator: Communicator) -> list[object]:
        def before(step: int) -> None:
            if step == 2:
                ended.wait()

        communicator.size = 3
        return train(communicator, before=before)

    def late() -> list[object]:
        joined.wait(LIMIT)
        newcomer = ranks.seated(Seat(ranks, 3, late=True))
        found = train(newcomer, range(2, STEPS), start=2)
        newcomer.close(finished=True)
        return found

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(late)
        ranks.size = 3  # type: ignore[misc]
        first, *others = ranks.run(action)
        assert others == [first, first]
        assert future.result(LIMIT) == first[-2 * 3 * 2 :]
    ranks.close()


def test_a_worker_in_a_lost_ones_place_pushes_its_own() -> None:
    """Before the first step it repeats what the lost one has asked the others."""
    expected, ranks = OneLevel.run_once(train), TwoLevels()
    begun = threading.Barrier(4, timeout=LIMIT)

    def action(communicator: Communicator) -> list[object]:
        if communicator.rank != 1:
            return train(communicator, before=lambda step: begun.wait() if step == 0 else None)
        attached(communicator, model(), 1 << 17)
        begun.wait()
        communicator.close(finished=False)
        ranks.see(0, 1, 2, 3, r1=9)
        seat = Seat(ranks, 1)
        seat.sender = Sender(1, 9)
        newcomer = ranks.seated(seat)
        found = train(newcomer)
        newcomer.close(finished=True)
        return found

    assert ranks.run(action) == expected
    ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["bf16", "int8", "topk:0.1"])
def test_sums_are_compressed_by_the_worker_that_pushes_them(codec: str) -> None:
    first, *others = of(TwoLevels, aggregate=True, compress=codec).run_once(train)
    assert others == [first] * 3


def test_all_members_hear_what_the_answers_of_key_0_announce() -> None:
    ranks = TwoLevels()

    def drain() -> None:
        for loop in ranks.loops:
            loop.command(loop.store.drain).result(LIMIT)

    asked = threading.Barrier(4, drain, LIMIT)
    saved = Counter[tuple[int, int]]()

    def action(communicator: Communicator) -> list[bool | None]:
        assert isinstance(communicator, PSCommunicator)
        client, heard, now = communicator._client, list[bool | None](), 0

        def before(step: int) -> None:
            nonlocal now
            now = step
            heard.append(communicator.draining)
            if step == communicator.rank == 0:
                for loop in ranks.loops:
                    assert loop.command(partial(loop.store.capture_at, 2)).result(LIMIT)
            if step == 2:
                asked.wait()

        client.on_saved = lambda: saved.update([(communicator.rank, now)])
        train(communicator, before=before)
        return [*heard, communicator.draining]

    assert ranks.run(action) == [[False, False, False, True, True]] * 4
    ranks.close()
    assert saved == Counter((rank, 1) for rank in range(4))

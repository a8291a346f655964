from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hubring.ps.core.errors import ConnectionLost, Fenced, HubringError, JobFailed, ServerUnreachable
from hubring.ps.core.messages import Call, Collective, Contribute
from hubring.ps.core.work import Work
from hubring.ps.store.consistency import ASP, BSP
from hubring.ps.transport.base import Connection, Message
from tests.support.transports.one_shard import NUMEL, SOON, OneShard, Passing, begin, push, started

start = pytest.fixture(started, name="start")
Start = Callable[..., OneShard]


def test_a_shard_counts_for_whom_it_held_answers_back(start: Start) -> None:
    hub = start(BSP(), 2)
    early, late = (hub.client(rank) for rank in range(2))
    values = [begin(client) for client in (early, late)]
    first = push(early, torch.zeros(NUMEL), values[0])
    hub.until(lambda loop: loop.store.stats().pushes == 1)
    second = push(late, torch.zeros(NUMEL), values[1])
    for work in (first, second):
        work.wait(SOON)
    service = hub.ask(lambda loop: loop.service)
    assert service.held.keys() == {0}
    assert service.held[0] > 0
    assert service.handled > 0


def test_a_refused_worker_learns_why(start: Start) -> None:
    hub = start(BSP(), 1)
    stranger = hub.client(7)
    work = Work("a pull")
    stranger.pull(0, 0, torch.zeros(NUMEL), work)
    with pytest.raises(Fenced, match="rank 7"):
        work.wait(SOON)


def test_a_refusal_of_the_protocol_is_no_error_of_settings(start: Start) -> None:
    hub = start(BSP(), 1)
    client = hub.client(0)
    work = Work("a pull")
    client.pull(0, 99, torch.zeros(NUMEL), work)
    with pytest.raises(HubringError, match="key 99 is not on this shard") as refused:
        work.wait(SOON)
    assert refused.value.exit_code == 1


def test_a_push_before_any_pull_is_a_clear_error(start: Start) -> None:
    client = start(BSP(), 1).client(0)
    with pytest.raises(HubringError, match="before the first pull"):
        push(client, torch.zeros(NUMEL), torch.zeros(NUMEL))


class Breaking(Passing):
    """A connection that breaks once, after a request went out and before its reply is read."""

    def __init__(self, inner: Connection, broken: list[bool], at: int) -> None:
        super().__init__(inner)
        self.broken, self.at, self.sent = broken, at, 0

    def send(self, message: Message, into: memoryview | None = None) -> None:
        self.sent += 1
        super().send(message, into)

    def receive(self) -> list[Message]:
        if self.sent >= self.at and not self.broken:
            self.broken.append(True)
            raise ConnectionLost("broken by the test")
        return super().receive()


@pytest.mark.parametrize("attended", [True, False])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_push_counts_once_though_its_connection_breaks(start: Start, at: int, attended: bool) -> None:
    hub = start(ASP(), 1)
    broken: list[bool] = []
    client = hub.client(0, lambda connection: Breaking(connection, broken, at))
    values = begin(client)
    for _ in range(4):
        push(client, torch.ones(NUMEL), values, attended=attended).wait(SOON)
    assert broken, "the connection never broke"
    assert torch.equal(values, torch.full((NUMEL,), 4.0))


def test_a_shard_that_is_gone_fails_everything_that_waits(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hubring.ps.client.connections.REDIAL_SECONDS", 0.3)
    hub = start(BSP(), 2)
    client = hub.client(0)
    values = begin(client)
    work = push(client, torch.ones(NUMEL), values)  # waits for rank 1 for ever
    hub.stop()
    with pytest.raises(ServerUnreachable, match="shard 0"):
        work.wait(SOON)
    with pytest.raises(ServerUnreachable):
        push(client, torch.ones(NUMEL), values).wait(SOON)


def test_fail_ends_what_waits_and_what_comes(start: Start) -> None:
    client = start(BSP(), 2).client(0)
    values = begin(client)
    work = push(client, torch.ones(NUMEL), values)
    client.fail(JobFailed("rank 1 is lost"))
    for waiting in (work, push(client, torch.ones(NUMEL), values)):
        with pytest.raises(JobFailed, match="rank 1 is lost"):
            waiting.wait(SOON)


def test_a_result_that_cannot_be_used_fails_its_own_call_alone(start: Start) -> None:
    client = start(BSP(), 1).client(0)
    values = begin(client)
    work = Work("a sum")

    def stumble(came: tuple[torch.Tensor, ...]) -> None:
        raise RuntimeError("no room for it")

    client.contribute(0, Contribute(client.sender, 1, Call(Collective.BARRIER, "sum")), work, stumble)
    with pytest.raises(HubringError, match="no room for it"):
        work.wait(SOON)
    push(client, torch.ones(NUMEL), values).wait(SOON)


def test_pulls_are_no_pushes_of_staleness_zero(start: Start) -> None:
    client = start(ASP(), 1).client(0)
    values = begin(client)
    for _ in range(3):
        push(client, torch.ones(NUMEL), values).wait(SOON)
    assert client.traffic.staleness == {0: 3}


def test_traffic_is_counted(start: Start) -> None:
    client = start(ASP(), 1).client(0)
    values = begin(client)
    push(client, torch.ones(NUMEL), values).wait(SOON)
    nbytes = NUMEL * 4
    assert (client.traffic.bytes_sent, client.traffic.bytes_received) == (2 * nbytes, 2 * nbytes)

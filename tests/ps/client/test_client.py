from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from hubring.ps.core.errors import ConnectionLost, Fenced, HubringError, JobFailed, ServerUnreachable
from hubring.ps.core.messages import Call, Collective, Contribute, ReduceOp
from hubring.ps.core.optimizer_state import OptimizerState
from hubring.ps.core.types import Layout
from hubring.ps.core.work import Work
from hubring.ps.store.consistency import ASP, BSP, Consistency
from hubring.ps.transport.base import Connection, Message
from tests.support.transports.one_shard import HYPER, NUMEL, SOON, OneShard, begin, push


@pytest.fixture
def hubs() -> Iterator[list[OneShard]]:
    """Hubs made in a test, stopped after it."""
    made: list[OneShard] = []
    yield made
    for hub in made:
        hub.stop()


def start(hubs: list[OneShard], consistency: Consistency, ranks: int) -> OneShard:
    hubs.append(OneShard(consistency, ranks))
    return hubs[-1]


def test_two_workers_get_the_mean_of_their_gradients(hubs: list[OneShard]) -> None:
    hub = start(hubs, BSP(), 2)
    clients = [hub.client(rank) for rank in range(2)]
    values = [begin(client) for client in clients]
    works = [
        push(client, torch.full((NUMEL,), float(rank + 1)), values[rank])
        for rank, client in enumerate(clients)
    ]
    for work in works:
        work.wait(SOON)
    assert all(torch.equal(value, torch.full((NUMEL,), 1.5)) for value in values)
    for client in clients:
        client.close()


def test_a_shard_counts_for_whom_it_held_answers_back(hubs: list[OneShard]) -> None:
    hub = start(hubs, BSP(), 2)
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
    early.close()
    late.close()


def test_a_refused_worker_learns_why(hubs: list[OneShard]) -> None:
    hub = start(hubs, BSP(), 1)
    stranger = hub.client(7)
    work = Work("a pull")
    stranger.pull(0, 0, torch.zeros(NUMEL), work)
    with pytest.raises(Fenced, match="rank 7"):
        work.wait(SOON)
    stranger.close()


def test_a_refusal_of_the_protocol_is_no_error_of_settings(hubs: list[OneShard]) -> None:
    hub = start(hubs, BSP(), 1)
    client = hub.client(0)
    work = Work("a pull")
    client.pull(0, 99, torch.zeros(NUMEL), work)
    with pytest.raises(HubringError, match="key 99 is not on this shard") as refused:
        work.wait(SOON)
    assert refused.value.exit_code == 1
    client.close()


def test_a_push_before_any_pull_is_a_clear_error(hubs: list[OneShard]) -> None:
    client = start(hubs, BSP(), 1).client(0)
    with pytest.raises(HubringError, match="before the first pull"):
        push(client, torch.zeros(NUMEL), torch.zeros(NUMEL))
    client.close()


class Breaking:
    """A connection that breaks once, after a request went out and before its reply is read."""

    def __init__(self, inner: Connection, broken: list[bool], at: int) -> None:
        self.inner, self.broken, self.at, self.sent = inner, broken, at, 0

    @property
    def waitable(self) -> int:
        return self.inner.waitable

    def send(self, message: Message, into: memoryview | None = None) -> None:
        self.sent += 1
        self.inner.send(message, into)

    def flush(self) -> None:
        self.inner.flush()

    def receive(self) -> list[Message]:
        if self.sent >= self.at and not self.broken:
            self.broken.append(True)
            raise ConnectionLost("broken by the test")
        return self.inner.receive()

    def close(self) -> None:
        self.inner.close()


@pytest.mark.parametrize("attended", [True, False])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_push_counts_once_though_its_connection_breaks(
    hubs: list[OneShard], at: int, attended: bool
) -> None:
    hub = start(hubs, ASP(), 1)
    broken: list[bool] = []
    client = hub.client(0, lambda connection: Breaking(connection, broken, at))
    values = begin(client)
    for _ in range(4):
        push(client, torch.ones(NUMEL), values, attended=attended).wait(SOON)
    assert broken, "the connection never broke"
    assert torch.equal(values, torch.full((NUMEL,), 4.0))
    client.close()


def test_a_shard_that_is_gone_fails_everything_that_waits(
    hubs: list[OneShard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hubring.ps.client.connections.REDIAL_SECONDS", 0.3)
    hub = OneShard(BSP(), 2)
    client = hub.client(0)
    values = begin(client)
    work = push(client, torch.ones(NUMEL), values)  # waits for rank 1 for ever
    hub.stop()
    with pytest.raises(ServerUnreachable, match="shard 0"):
        work.wait(SOON)
    with pytest.raises(ServerUnreachable):
        push(client, torch.ones(NUMEL), values).wait(SOON)
    client.close()


def test_fail_ends_what_waits_and_what_comes(hubs: list[OneShard]) -> None:
    client = start(hubs, BSP(), 2).client(0)
    values = begin(client)
    work = push(client, torch.ones(NUMEL), values)
    client.fail(JobFailed("rank 1 is lost"))
    for waiting in (work, push(client, torch.ones(NUMEL), values)):
        with pytest.raises(JobFailed, match="rank 1 is lost"):
            waiting.wait(SOON)
    client.close()


def test_collectives_are_matched_by_name(hubs: list[OneShard]) -> None:
    hub = start(hubs, BSP(), 2)
    clients = [hub.client(rank) for rank in range(2)]
    results: dict[tuple[int, str], float] = {}
    works: list[Work] = []
    for rank, client in enumerate(clients):
        for name in ("a", "b") if rank == 0 else ("b", "a"):
            given = torch.tensor(float(rank + 1) * (10 if name == "a" else 1))
            call = Call(Collective.ALLREDUCE, name, ReduceOp.SUM, layouts=(Layout("float32", ()),))
            request = Contribute(client.sender, len(works) + 1, call, (given,))
            work = Work(name)

            def keep(came: tuple[torch.Tensor, ...], key: tuple[int, str] = (rank, name)) -> None:
                (result,) = came
                results[key] = result.item()

            client.contribute(0, request, work, keep)
            works.append(work)
    for work in works:
        work.wait(SOON)
    assert results == {(0, "a"): 30.0, (1, "a"): 30.0, (0, "b"): 3.0, (1, "b"): 3.0}
    for client in clients:
        client.close()


def test_a_result_that_cannot_be_used_fails_its_own_call_alone(hubs: list[OneShard]) -> None:
    client = start(hubs, BSP(), 1).client(0)
    values = begin(client)
    work = Work("a sum")

    def stumble(came: tuple[torch.Tensor, ...]) -> None:
        raise RuntimeError("no room for it")

    client.contribute(0, Contribute(client.sender, 1, Call(Collective.BARRIER, "sum")), work, stumble)
    with pytest.raises(HubringError, match="no room for it"):
        work.wait(SOON)
    push(client, torch.ones(NUMEL), values).wait(SOON)
    client.close()


def test_pulls_are_no_pushes_of_staleness_zero(hubs: list[OneShard]) -> None:
    client = start(hubs, ASP(), 1).client(0)
    values = begin(client)
    for _ in range(3):
        push(client, torch.ones(NUMEL), values).wait(SOON)
    assert client.traffic.staleness == {0: 3}
    client.close()


def test_traffic_is_counted(hubs: list[OneShard]) -> None:
    client = start(hubs, ASP(), 1).client(0)
    values = begin(client)
    push(client, torch.ones(NUMEL), values).wait(SOON)
    nbytes = NUMEL * 4
    assert (client.traffic.bytes_sent, client.traffic.bytes_received) == (2 * nbytes, 2 * nbytes)
    client.close()


def test_writes_and_reads_of_state_go_before_the_next_push(hubs: list[OneShard]) -> None:
    hub = start(hubs, BSP(), 1)
    client = hub.client(0)
    values = begin(client)
    for buffer in (5.0, 10.0):
        state = OptimizerState({"momentum_buffer": torch.full((NUMEL,), buffer)})
        done(client.write_state, 0, 0, state)
    done(client.write_parameters, 0, 0, torch.full((NUMEL,), 7.0))
    came: list[OptimizerState] = []
    work = Work("a read")
    client.read_state(0, 0, work, came.append)
    work.wait(SOON)
    assert came[0].tensors["momentum_buffer"].tolist() == [10.0] * NUMEL
    pushed = Work("a push")
    hyper = {**HYPER, "momentum": 0.5}
    client.push_pull(0, 0, torch.ones(NUMEL), values, hyper, pushed)
    pushed.wait(SOON)
    assert values.tolist() == [13.0] * NUMEL  # 7 + (0.5 * 10 + 1)
    client.close()


def test_the_caller_gets_what_is_absent_everywhere_before_the_work_is_done(hubs: list[OneShard]) -> None:
    client = start(hubs, BSP(), 1).client(0)
    values = begin(client)
    came: list[tuple[int, ...]] = []
    work = Work("a push")
    client.push_pull(
        0,
        0,
        torch.zeros(NUMEL),
        values,
        HYPER,
        work,
        absent=(0,),
        on_absent=lambda absent: came.append(absent),
    )
    work.wait(SOON)
    assert came == [(0,)]
    assert values.tolist() == [0.0] * NUMEL
    client.close()


def done(call: Callable[..., None], *arguments: object) -> None:
    work = Work("a request")
    call(*arguments, work)
    work.wait(SOON)

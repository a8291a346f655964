from __future__ import annotations

import signal
from typing import Any

import pytest

from hubring.ps.config.server import ServerConfig
from hubring.ps.core.errors import ConfigError, HubringError, JobFailed, NonFinite
from hubring.ps.job.outcome import Outcome
from hubring.ps.process.children import Children
from hubring.ps.process.process import Adopted, Process
from hubring.ps.server import Server
from tests.support.fakes.coordinator import Hub, run


@pytest.mark.parametrize(
    ("outcome", "code"),
    [(Outcome(finished=[0, 1]), 0), (Outcome(preempted=[0, 1]), 75), (Outcome(finished=[0], broke=True), 75)],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_server_that_is_stopped_asks_to_be_started_again_unless_its_only_job_is_done(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, outcome: Outcome, code: int
) -> None:
    async def story() -> None:
        server, coordinator = Server(ServerConfig(once=True)), Hub(monkeypatch, once=True).coordinator
        coordinator.outcome = outcome
        server._on_signal(number, coordinator)
        assert server._exit_code(coordinator) == code

    run(story())


@pytest.mark.parametrize(
    ("failure", "code"), [(NonFinite("x"), 1), (ConfigError("x"), 78), (JobFailed("x"), 75)]
)
def test_what_would_fail_again_is_not_asked_to_be_started_again(
    monkeypatch: pytest.MonkeyPatch, failure: HubringError, code: int
) -> None:
    async def story() -> None:
        server, coordinator = Server(ServerConfig(once=True)), Hub(monkeypatch, once=True).coordinator
        coordinator.job.fail(failure)
        coordinator.outcome = coordinator.job.outcome
        server._on_signal(signal.SIGTERM, coordinator)
        assert server._exit_code(coordinator) == code

    run(story())


def test_a_last_checkpoint_that_was_not_written_fails_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        server, coordinator = Server(ServerConfig(once=True)), Hub(monkeypatch, once=True).coordinator
        coordinator.outcome = Outcome(finished=[0, 1])
        assert server._exit_code(coordinator) == 0
        coordinator.checkpoints.failure = ConfigError("no space left")
        assert server._exit_code(coordinator) == 78

    run(story())


def test_a_server_that_takes_over_from_one_that_was_ending_does_not_miss_its_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        server, coordinator = Server(ServerConfig(once=True)), Hub(monkeypatch, once=True).coordinator
        shards: Children[Any] = Children()
        ended = shards.add(Adopted("a shard process", Process(2**22, 0)))
        assert ended.ended
        coordinator.done.set()
        await server._supervise(coordinator, shards)
        assert coordinator.failure is None
        assert shards.started == [ended]

    run(story())

from __future__ import annotations

import signal
from typing import Any
from unittest.mock import Mock

import pytest

from hubring.ps.config.server import ServerConfig
from hubring.ps.core.errors import ConfigError, HubringError, JobFailed, NonFinite
from hubring.ps.job.outcome import JobOutcome
from hubring.ps.process.child import Adopted, Children, Process
from hubring.ps.server import TICK_SECONDS, Server
from tests.support.fakes.coordinator import Hub


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (JobOutcome(finished=[0, 1]), 0),
        (JobOutcome(preempted=[0, 1]), 75),
        (JobOutcome(finished=[0], broke=True), 75),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
async def test_a_server_that_is_stopped_asks_to_be_started_again_unless_its_only_job_is_done(
    number: signal.Signals, outcome: JobOutcome, code: int
) -> None:
    server, coordinator = Server(ServerConfig(once=True)), Hub(once=True).coordinator
    coordinator.outcome = outcome
    server._on_signal(number, coordinator)
    assert server._exit_code(coordinator) == code


@pytest.mark.parametrize(
    ("failure", "code"), [(NonFinite("x"), 1), (ConfigError("x"), 78), (JobFailed("x"), 75)]
)
async def test_a_stop_request_does_not_hide_the_exit_code_of_a_failed_job(
    failure: HubringError, code: int
) -> None:
    server, coordinator = Server(ServerConfig(once=True)), Hub(once=True).coordinator
    coordinator.job.fail(failure)
    coordinator.outcome = coordinator.job.outcome
    server._on_signal(signal.SIGTERM, coordinator)
    assert server._exit_code(coordinator) == code


async def test_a_pause_of_the_server_extends_all_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.ps.server.time", Mock(monotonic=Mock(side_effect=[0, 0, 0, 10, 10])))
    server, hub = Server(ServerConfig(once=True)), Hub(once=True)
    server._missing, extend = Mock(), Mock(side_effect=lambda *_: server._quit.set())
    monkeypatch.setattr(hub.coordinator.job, "extend_leases", extend)
    await server._supervise(hub.coordinator, hub.reporter, Children())
    extend.assert_called_once_with(10 - TICK_SECONDS, hub.time.now())


async def test_a_stop_request_is_on_record_before_it_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    server, coordinator = Server(ServerConfig()), Hub().coordinator
    recorded: list[tuple[int, str]] = []
    coordinator.fleet.before_call = lambda: recorded.append((len(server._signals), caplog.text))
    server._on_signal(signal.SIGTERM, coordinator)
    assert recorded == [(1, "")]
    assert "SIGTERM: the server stops" in caplog.text


async def test_a_server_that_takes_over_from_one_that_was_ending_does_not_miss_its_shards() -> None:
    server, hub = Server(ServerConfig(once=True)), Hub(once=True)
    shards: Children[Any] = Children()
    ended = shards.add(Adopted("a shard process", Process(2**22, 0)))
    assert ended.ended
    hub.coordinator.done.set()
    await server._supervise(hub.coordinator, hub.reporter, shards)
    assert hub.coordinator.failure is None
    assert shards.started == [ended]


async def test_a_host_name_that_leads_to_loopback_is_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hubring.ps.server.numeric", lambda host: "127.0.1.1")
    server, hub = Server(ServerConfig(host="node1", insecure=True, port=0)), Hub()
    listening, _ = await server._listen(hub.coordinator, hub.reporter)
    await listening.stop(None)
    assert "no other host reaches node1 (127.0.1.1); give --host an IP address" in caplog.text

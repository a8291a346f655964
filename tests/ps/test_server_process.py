"""The end of a coordinator's process."""

from __future__ import annotations

from typing import Any

import pytest

from hubring.ps import server_process
from hubring.ps.config.server import ServerConfig
from hubring.ps.core.errors import ConfigError
from hubring.ps.recovery.guardian import CoordinatorSettings, ServerReport
from hubring.ps.recovery.succession import Succession


class Ending:
    """A server that ends at once, and the order of what its process does then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.order: list[str] = []
        self.reported: list[ServerReport] = []

        class Server:
            def __init__(self, config: ServerConfig, succession: Succession) -> None: ...

            async def run(self) -> tuple[int, dict[str, Any]]:
                if error is not None:
                    raise error
                return 3, {"steps": 5}

        monkeypatch.setattr(server_process, "Server", Server)
        monkeypatch.setattr(
            server_process, "own_settings", lambda: CoordinatorSettings(ServerConfig(), -1, -1)
        )
        monkeypatch.setattr(server_process, "report_to_guardian", self._report)
        monkeypatch.setattr(Succession, "end", lambda _: self.order.append("the standby ends"))

    def _report(self, settings: CoordinatorSettings, ended: ServerReport) -> bool:
        self.order.append("the guardian hears")
        self.reported.append(ended)
        return True


def test_a_standby_lives_until_the_guardian_has_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(monkeypatch)
    assert server_process.main() == 3
    assert ending.reported == [ServerReport(3, {"steps": 5, "exit_code": 3})]
    assert ending.order == ["the guardian hears", "the standby ends"]


def test_a_standby_of_a_server_that_fails_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(monkeypatch, ConfigError("the port is taken"))
    assert server_process.main() == 78
    assert ending.reported[0].error == "the port is taken"
    assert ending.order == ["the guardian hears", "the standby ends"]


def test_no_standby_goes_on_after_a_server_with_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        server_process.main()
    assert ending.order == ["the standby ends"]

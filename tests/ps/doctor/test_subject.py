"""What the doctor examines: the settings that a server would find, and where a ring would meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from hubring.ps.config.server import ServerConfig
from hubring.ps.core.errors import ConfigError
from hubring.ps.doctor import subject

HERE_ALONE = subject.Subject(ServerConfig(), None, None, {}, 20.0)


def test_settings_are_those_that_a_server_would_find(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[server]\nport = 7000\n")
    config = subject.settled({"checkpoint_dir": tmp_path}, file, {"PS_PAGE_PORT": "8000"})
    assert (config.port, config.page_port, config.checkpoint_dir) == (7000, 8000, tmp_path)
    with pytest.raises(ConfigError, match="--port 70000"):
        subject.settled({"port": 70000}, None, {})


def test_the_ring_of_a_server_here_meets_here() -> None:
    here = HERE_ALONE
    assert here.ring_address == "127.0.0.1"
    assert here._replace(server="localhost:5555").ring_address == "localhost"
    with pytest.raises(ConfigError, match="no route from this machine to"):
        _ = here._replace(server="255.255.255.255:5555").ring_address

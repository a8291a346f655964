"""The banner says who needs a copy of the tokens, and that data is not encrypted."""

from __future__ import annotations

from pathlib import Path

import pytest

from hubring.ps.config.server import ServerConfig
from hubring.ps.observe.banner import banner

TOKENS = Path("/run/tokens")


def shown(config: ServerConfig) -> str:
    return banner(config, "here:5555", None if config.insecure else TOKENS, [], "")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_no_other_host_reaches_a_server_on_loopback(host: str) -> None:
    line = "in /run/tokens; other users of this host need a copy. For workers on other hosts, use --host"
    assert line in shown(ServerConfig(host=host))
    assert "workers on other hosts need a copy" not in shown(ServerConfig(host=host))


def test_workers_on_other_hosts_need_a_copy() -> None:
    assert "in /run/tokens; workers on other hosts need a copy, in --token" in shown(
        ServerConfig(host="node1")
    )


def test_plain_data_is_announced_where_it_counts() -> None:
    line = "data      gradients over ZeroMQ are not encrypted (--plain-data)"
    assert line in shown(ServerConfig(host="node1", plain_data=True))
    for config in (
        ServerConfig(host="node1"),
        ServerConfig(plain_data=True),
        ServerConfig(host="node1", plain_data=True, insecure=True),
    ):
        assert "ZeroMQ" not in shown(config)

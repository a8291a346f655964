"""What is examined: this machine as it would run our programs, and the path to one server."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hubring.ps.config.address import address, is_loopback
from hubring.ps.config.server import ServerConfig
from hubring.ps.config.sources import load_server
from hubring.ps.core.errors import ConfigError
from hubring.ps.transport.host import reachable, towards

LOOPBACK = "127.0.0.1"


class Subject(NamedTuple):
    """A machine, and what is to run there.

    Attributes:
        config: A server's settings as `ps-server start` would find them.
        config_file: The TOML file that was given for it, if any.
        server: `HOST:PORT` of a running server to examine, if any.
        variables: The environment.
        seconds: How long a check may take.
    """

    config: ServerConfig
    config_file: Path | None
    server: str | None
    variables: Mapping[str, str]
    seconds: float

    @property
    def server_host(self) -> str:
        """The server's host; by default this one, where a server listens by default."""
        return address(self.server)[0] if self.server else LOOPBACK

    @property
    def ring_address(self) -> str:
        """This machine's address as the other members of a ring dial it.

        Raises:
            ConfigError: No route leads to the server.
        """
        host = self.server_host
        return host if is_loopback(host) else towards(host)


def settled(
    flags: Mapping[str, object], config_file: Path | None, variables: Mapping[str, str]
) -> ServerConfig:
    """The server's settings; from the flags alone if another place is wrong, which a check reports.

    Raises:
        ConfigError: A flag is wrong.
    """
    try:
        return load_server(flags, config_file, variables)
    except ConfigError:
        return load_server(flags, None, {})


def outside() -> str:
    """The address from which this machine talks to others; the loopback one where no route leads out."""
    found = reachable("")
    return LOOPBACK if found == socket.gethostname() else found

"""The subject of the checks: this machine with the settings of a server, and the connection to one server."""

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
    """This machine and the settings of a server on it.

    Attributes:
        config: The server settings that `ps-server start` would use.
        config_file: The TOML file from `--config`, if any.
        server: `HOST:PORT` of a running server to check, if any.
        variables: The environment.
        seconds: Time limit of a check.
    """

    config: ServerConfig
    config_file: Path | None
    server: str | None
    variables: Mapping[str, str]
    seconds: float

    @property
    def server_host(self) -> str:
        """The server's host; loopback if there is no server."""
        return address(self.server)[0] if self.server else LOOPBACK

    @property
    def ring_address(self) -> str:
        """This machine's address for the other members of a ring.

        Raises:
            ConfigError: No route leads to the server.
        """
        host = self.server_host
        return host if is_loopback(host) else towards(host)


def settled(
    flags: Mapping[str, object], config_file: Path | None, variables: Mapping[str, str]
) -> ServerConfig:
    """Returns the server's settings; from the flags alone if the file or the environment is wrong.

    The settings check reports such an error.

    Raises:
        ConfigError: A flag is wrong.
    """
    try:
        return load_server(flags, config_file, variables)
    except ConfigError:
        return load_server(flags, None, {})


def outside() -> str:
    """Returns the source address for connections to other machines, or loopback if there is no route."""
    found = reachable("")
    return LOOPBACK if found == socket.gethostname() else found

"""The page's port, taken before anybody is told of it."""

from __future__ import annotations

import os
import socket

from hubring.ps.core.errors import ConfigError
from hubring.ps.transport.host import bracketed, numeric

LAST = 65535


def choose(given: int | None, control: int) -> int:
    """The port that is meant where none may be given: the one after the control port; 0 for a free one.

    Raises:
        ConfigError: There is none after that.
    """
    if given is not None:
        return given
    if control == LAST:
        raise ConfigError(
            f"--port {control} is the last, so none is left after it for the status page:"
            " give --page-port too, 0 for a free one, or --no-page"
        )
    return control + 1 if control else 0


def take(host: str, port: int) -> socket.socket:
    """A socket that listens; whoever dials it early waits until something answers.

    Args:
        host: As `--host`.
        port: 0 takes a free one.

    Raises:
        ConfigError: The port is taken, or the host is not this machine's.
    """
    here = numeric(host)
    family = socket.AF_INET6 if ":" in here else socket.AF_INET
    try:
        return socket.create_server((here, port), family=family)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(
            f"the status page cannot listen on {bracketed(here)}:{port} ({why}):"
            " try --page-port 0 for a free one, or --no-page"
        ) from error

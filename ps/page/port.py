"""The page's port, which is bound before the banner prints it."""

from __future__ import annotations

import os
import socket

from hubring.ps.core.errors import ConfigError
from hubring.ps.transport.host import bracketed, numeric

LAST = 65535


def choose(given: int | None, control: int) -> int:
    """Returns the port to use: `given`, or else the one after the control port. 0 means a free port.

    Raises:
        ConfigError: The control port is the last one.
    """
    if given is not None:
        return given
    if control == LAST:
        raise ConfigError(
            f"--port {control} is the last port, so there is no next one for the status page;"
            " set --page-port too (0 for a free port), or use --no-page"
        )
    return control + 1 if control else 0


def take(host: str, port: int) -> socket.socket:
    """Opens a listening socket. Early clients wait until the server answers.

    Args:
        host: The value of `--host`.
        port: The port; 0 for a free one.

    Raises:
        ConfigError: The port is taken, or the host is not this machine.
    """
    here = numeric(host)
    family = socket.AF_INET6 if ":" in here else socket.AF_INET
    try:
        return socket.create_server((here, port), family=family)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(
            f"the status page cannot listen on {bracketed(here)}:{port} ({why});"
            " use --page-port 0 for a free port, or --no-page"
        ) from error

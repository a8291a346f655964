"""The page's HTTP listener, in the coordinator's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn

from ps.errors import ConfigError
from ps.transport.host import bracketed, numeric

if TYPE_CHECKING:
    from starlette.types import ASGIApp

GOODBYE_SECONDS = 1
"""How long whoever watches gets to hear of the end."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        ConfigError: The port is taken, or the host is not this machine's.
    """
    family = socket.AF_INET6 if ":" in numeric(host) else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((numeric(host), port))
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"the status page cannot listen on {bracketed(host)}:{port} ({error.strerror}):"
            " try --page-port 0 for a free one, or --no-page"
        ) from error
    return listening


class HttpListener:
    """Serves one app until it is closed.

    Args:
        app: What answers.
        listening: From `bind`; closed with the listener.
    """

    def __init__(self, app: ASGIApp, listening: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=GOODBYE_SECONDS,
        )
        self._server = _Quiet(config)
        self._serving = asyncio.create_task(self._server.serve([listening]))

    async def close(self) -> None:
        """Ends it; whoever watches is cut off after a moment."""
        self._server.should_exit = True
        await self._serving


class _Quiet(uvicorn.Server):
    """Signals are the hub's to handle."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

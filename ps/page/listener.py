"""The page's HTTP listener. It runs in the coordinator's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

GOODBYE_SECONDS = 1
"""How long clients have to read the rest of a response when the listener closes."""

MOST_VISITORS = 64
"""Limit on concurrent requests; the server answers further ones with 503."""

MOST_CONNECTIONS = 128
"""Limit on open connections; further ones are closed, which leaves file descriptors for the workers."""

SILENT_SECONDS = 5
"""How long a connection can stay open without a complete request."""

DATE_SECONDS = 1.0
"""How often the Date header is updated."""


class HttpListener:
    """Serves one app until it is closed.

    Args:
        app: The app.
        listening: A socket from `hubring.ps.page.port.take`; the listener closes it.
    """

    def __init__(self, app: ASGIApp, listening: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=SILENT_SECONDS,
            timeout_graceful_shutdown=GOODBYE_SECONDS,
            limit_concurrency=MOST_VISITORS,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([listening]))

    async def close(self) -> None:
        """Stops serving. Clients that are still reading after GOODBYE_SECONDS are disconnected."""
        self._server.end()
        await asyncio.wait([self._serving])
        if error := self._serving.exception():
            log.error("the status page failed: %s", error)


class _Protocol(H11Protocol):
    """Closes connections beyond the limit, and connections without a complete request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
            return
        self.timeout_keep_alive_task = self.loop.call_later(SILENT_SECONDS, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        # Uvicorn's method cancels the deadline at the first byte, so half a request would stay open forever.
        self.conn.receive_data(data)
        self.handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._unset_keepalive_if_required()


class _Server(uvicorn.Server):
    """Leaves signals to the hub, and stops on an event instead of polling."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopped = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._stopped.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), DATE_SECONDS)

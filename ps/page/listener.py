"""The page's HTTP listener, in the coordinator's own loop."""

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
"""How long whoever is being answered may take to read the end of it."""

MOST_VISITORS = 64
"""At once; whoever comes beyond is told 503."""

MOST_LINES = 128
"""Connections at once; those beyond are cut, so that the process's descriptors stay its workers'."""

SILENT_SECONDS = 5
"""How long a connection may be without a whole request."""

DATE_SECONDS = 1.0
"""How often the date is written anew that goes with every answer."""


class HttpListener:
    """Serves one app until it is closed.

    Args:
        app: What answers.
        listening: From `hubring.ps.page.port.take`; closed with the listener.
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
        """Ends it; who has not read its answer by then is cut off."""
        self._server.end()
        await asyncio.wait([self._serving])
        if error := self._serving.exception():
            log.error("the status page broke off: %s", error)


class _Protocol(H11Protocol):
    """Cuts those who come when there are too many already, and who never come to ask anything."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_LINES:
            transport.abort()
            return
        self.timeout_keep_alive_task = self.loop.call_later(SILENT_SECONDS, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        # Uvicorn's own drops the deadline at the first byte: whoever sent half a request could stay for good.
        self.conn.receive_data(data)
        self.handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._unset_keepalive_if_required()


class _Server(uvicorn.Server):
    """Heeds no signals, which are the hub's to handle, and is told of its end rather than looks for it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._told.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), DATE_SECONDS)

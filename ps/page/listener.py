"""The page's HTTP listener. It runs in the coordinator's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from hubring.ps.core import bounds
from hubring.ps.core.bounds import Rejections

log = logging.getLogger(__name__)

GOODBYE_SECONDS = 1
"""How long clients have to read the rest of a response when the listener closes."""

MOST_CONNECTIONS = 128
"""Limit on open connections; further ones are closed, which leaves file descriptors for the workers."""

MOST_OF_ADDRESS = 32
"""Limit on open connections of one IP address, which leaves room for others; further ones are closed."""

MOST_AT_ONCE = 64
"""Connections to accept before the event loop serves others, such as the workers' heartbeats."""

SLOW_SECONDS = 10.0
"""How long a client can leave a response unread before its connection is closed."""

SILENT_SECONDS = 5
"""How long a connection can stay open without a complete request."""

DATE_SECONDS = 1.0
"""How often the Date header is updated."""


class HttpListener:
    """Serves one app until it is closed.

    Args:
        app: The app.
        listening: A socket from `hubring.ps.page.site.take_port`; the listener closes it.
        rejections: Counts closed connections.
    """

    def __init__(self, app: ASGIApp, listening: socket.socket, rejections: Rejections) -> None:
        config = uvicorn.Config(
            app,
            http=partial(_Protocol, rejections),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # uvicorn warns of each invalid request
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=SILENT_SECONDS,
            timeout_graceful_shutdown=GOODBYE_SECONDS,
            backlog=MOST_AT_ONCE,
        )
        _count_failed_accepts(rejections)
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([listening]))

    async def close(self) -> None:
        """Stops serving. Clients that are still reading after GOODBYE_SECONDS are disconnected."""
        self._server.end()
        await asyncio.wait([self._serving])
        if error := self._serving.exception():
            log.error("the status page failed: %s", error)


class _Protocol(H11Protocol):
    """Closes connections beyond the limits, without a complete request, or that do not read."""

    def __init__(self, rejections: Rejections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._rejections = rejections
        self._slow: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        same = sum(_address(other) == address for other in self.connections)
        most = bounds.descriptor_share(MOST_CONNECTIONS, 8)
        if len(self.connections) > most or same > MOST_OF_ADDRESS:
            text = f"refused a connection of {address} to the status page: {same} of it are open"
            self._rejections.add("connections", log, text)
            transport.abort()
            return
        self.timeout_keep_alive_task = self.loop.call_later(SILENT_SECONDS, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self.resume_writing()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # else its timer holds what the client sent

    def send_400_response(self, msg: str) -> None:
        text = f"refused a request of {_address(self)} to the status page: it is not HTTP"
        self._rejections.add("message", log, text)
        super().send_400_response(msg)

    def pause_writing(self) -> None:
        # Uvicorn would wait for the client without a limit.
        super().pause_writing()
        self._slow = self.loop.call_later(SLOW_SECONDS, self._drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _drop(self) -> None:
        self._rejections.add("slow reader", log, f"closed a connection of {self.client}, which does not read")
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        # Uvicorn's method cancels the deadline at the first byte, so half a request would stay open forever.
        self.conn.receive_data(data)
        self.handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._unset_keepalive_if_required()


def _count_failed_accepts(rejections: Rejections) -> None:
    """Counts connections for which the system had no descriptor; asyncio would log 64 tracebacks a second."""

    def note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and "socket" in context and bounds.out_of_descriptors(error):
            text = f"cannot accept a connection to the status page for now: {error.strerror}"
            rejections.add("descriptors", log, text)
        else:
            loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(note)


def _address(connection: object) -> str:
    """Returns the peer's IP address; empty if it is not known."""
    client = getattr(connection, "client", None)
    return client[0] if client else ""


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

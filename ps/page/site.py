"""Site: the status page of one server."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from hubring.ps.config.address import is_loopback
from hubring.ps.config.server import ServerConfig
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.rejections import Rejections
from hubring.ps.core.timing import SystemTime
from hubring.ps.observe.journal import Journal
from hubring.ps.page import port
from hubring.ps.page import token as tokens
from hubring.ps.page.history import EVERY_SECONDS, History
from hubring.ps.page.status_reader import Hub, StatusReader
from hubring.ps.security import private_file
from hubring.ps.security import token_file as files
from hubring.ps.transport.host import bracketed, reachable

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from hubring.ps.page.broadcast import Broadcast
    from hubring.ps.page.listener import HttpListener


log = logging.getLogger(__name__)


class Site:
    """Binds a port at once, and answers requests from `serve` to `close`.

    Args:
        config: The server's settings.
        token: The page's token; empty for the one in the settings, or a new one.
        terminal: Whether only this user sees the banner.

    Raises:
        ConfigError: The port is taken, or the token file cannot be used.
    """

    def __init__(self, config: ServerConfig, token: str = "", *, terminal: bool = False) -> None:
        self._config = config
        self._terminal = terminal
        self.token = token or tokens.settle(config.page_token_file)
        self._listening = port.take(config.host, port.choose(config.page_port, config.port))
        here = bracketed(reachable(config.host))
        self.port: int = self._listening.getsockname()[1]
        self.address = f"http://{here}:{self.port}"
        """The URL without a path."""
        self._link = f"{self.address}/#token={self.token}"
        """The token is in the fragment, which browsers do not send."""
        self._link_file: Path | None = None
        """Has the link of a server whose banner goes to a log, which others may read."""
        if config.page_token_file is None and not terminal:
            self._link_file = _write_link(self._link, self.port)
        self._journal = Journal()
        logging.getLogger().addHandler(self._journal)
        self._broadcast: Broadcast | None = None
        self._reader: StatusReader | None = None
        self._listener: HttpListener | None = None
        self._sampling: asyncio.Task[None] | None = None

    def banner(self) -> list[str]:
        """Returns lines for the server's banner. Only a terminal shows the token."""
        if self._config.page_token_file is not None:
            page = f"{self.address}/  (token: {self._config.page_token_file})"
        elif self._terminal:
            page = self._link
        elif self._link_file is not None:
            page = f"{self.address}/  (link with the token: {self._link_file})"
        else:
            page = f"{self.address}/  (to use its buttons, set --page-token-file)"
        return [f"  page      {page}", f"  metrics   {self.address}/metrics"]

    async def serve(self, hub: Hub, rejections: Rejections | None = None) -> None:
        """Starts to answer. The imports run in a thread, because the loop must answer workers meanwhile.

        Args:
            hub: The hub.
            rejections: Counts the connections that the page closes.
        """
        await asyncio.to_thread(load)
        from hubring.ps.page.broadcast import Broadcast
        from hubring.ps.page.listener import HttpListener
        from hubring.ps.page.renderer import Renderer
        from hubring.ps.page.routes import app

        history = History()
        self._reader = reader = StatusReader(hub)
        renderer = Renderer(reader, history, self._journal, SystemTime())
        self._broadcast = broadcast = Broadcast(renderer)
        host = self._config.host
        names = {"localhost", "127.0.0.1", "[::1]", bracketed(host).lower()} if is_loopback(host) else ()
        made: ASGIApp = app(
            hub, reader, renderer, broadcast, self.token, names, public=self._config.page_public
        )
        self._listener = HttpListener(made, self._listening, rejections or Rejections())
        self._sampling = asyncio.create_task(_sample(reader, history))

    async def close(self) -> None:
        """Ends every stream and closes the port."""
        logging.getLogger().removeHandler(self._journal)
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.wait([self._sampling])
        if self._broadcast is not None:
            self._broadcast.close()
        if self._listener is not None:
            await self._listener.close()
        if self._reader is not None:
            await self._reader.close()
        self._listening.close()
        if self._link_file is not None:
            self._link_file.unlink(missing_ok=True)


def _write_link(link: str, port: int) -> Path | None:
    """Writes the page's link to a file that only this user can read; returns None if there is no place."""
    try:
        file = files.runtime_file(port).with_suffix(".page")
        private_file.write(file, f"{link}\n")
    except ConfigError as error:
        log.warning("the status page's token is not kept: %s", error)
        return None
    return file


def load() -> None:
    """Imports the slow modules."""
    import hubring.ps.page.listener
    import hubring.ps.page.routes  # noqa: F401


async def _sample(reader: StatusReader, history: History) -> None:
    while True:
        history.note(reader.workers())
        await asyncio.sleep(EVERY_SECONDS)

"""The status page of one server, from its port, which is bound before the banner prints it, to its end.

The page's token protects its buttons.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from contextlib import AsyncExitStack
from pathlib import Path

from hubring.ps.config.server import ServerConfig
from hubring.ps.config.values import is_loopback
from hubring.ps.coordinator.coordinator import Coordinator
from hubring.ps.coordinator.status import StatusReporter
from hubring.ps.core.bounds import Rejections
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.timing import SystemTime
from hubring.ps.observe.logs import Journal
from hubring.ps.page.status_reader import SAMPLE_SECONDS, History, StatusReader
from hubring.ps.security import private_file
from hubring.ps.security import token_file as files
from hubring.ps.security.token_file import read_secret
from hubring.ps.transport.host import bracketed, numeric, reachable


def take_port(host: str, port: int) -> socket.socket:
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


log = logging.getLogger(__name__)


class StatusPage:
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
        self.token = token or settle_page_token(config.page_token_file)
        self._listening = take_port(config.host, config.status_port or 0)
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
        self._closing = AsyncExitStack()
        """What `close` undoes, the last first."""
        if self._link_file is not None:
            self._closing.callback(self._link_file.unlink, missing_ok=True)
        self._closing.callback(self._listening.close)
        self._closing.callback(logging.getLogger().removeHandler, self._journal)

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

    async def serve(
        self, hub: Coordinator, reporter: StatusReporter, rejections: Rejections | None = None
    ) -> None:
        """Starts to answer. The imports run in a thread, because the loop must answer workers meanwhile.

        Args:
            hub: The hub that the buttons control.
            reporter: Tells its status.
            rejections: Counts the connections that the page closes.
        """
        await asyncio.to_thread(load)
        from hubring.ps.page.listener import HttpListener
        from hubring.ps.page.renderer import Broadcast, Renderer
        from hubring.ps.page.routes import app

        history = History()
        reader = StatusReader(reporter)
        self._closing.push_async_callback(reader.close)
        renderer = Renderer(reader, history, self._journal, SystemTime())
        broadcast = Broadcast(renderer)
        host = self._config.host
        names = {"localhost", "127.0.0.1", "[::1]", bracketed(host).lower()} if is_loopback(host) else ()
        made = app(hub, reader, renderer, broadcast, self.token, names, public=self._config.page_public)
        listener = HttpListener(made, self._listening, rejections or Rejections())
        self._closing.push_async_callback(listener.close)
        self._closing.callback(broadcast.close)  # which ends the streams that the listener serves
        sampling = asyncio.create_task(_sample(reader, history))
        self._closing.push_async_callback(asyncio.wait, [sampling])
        self._closing.callback(sampling.cancel)

    async def close(self) -> None:
        """Ends every stream and closes the port."""
        await self._closing.aclose()


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
        await asyncio.sleep(SAMPLE_SECONDS)


OPTION = "--page-token-file"

SHORTEST = 16
"""Smallest number of characters; a shorter token could be guessed."""

_CONTENT = "the page's token"
_MAKE = "Make one with head -c 18 /dev/urandom | base64"


def settle_page_token(file: Path | None) -> str:
    """Returns the token in the file, or a random one.

    Raises:
        ConfigError: The file cannot be read, others can read it, or its token is too short.
    """
    if file is None:
        return secrets.token_urlsafe(18)
    if not private_file.exists(file, OPTION, _CONTENT):
        raise ConfigError(  # which does not repeat the name: it may be a token
            f"{OPTION} names a file that does not exist; pass the name of a file with a token. {_MAKE}"
        )
    token = read_secret(file, OPTION, f"delete it. {_MAKE}", _CONTENT).strip()
    if len(token) < SHORTEST:
        raise ConfigError(
            f"{OPTION} {file} has {len(token)} characters; a token needs at least {SHORTEST}. {_MAKE}"
        )
    return token


def is_same_token(given: str, token: str) -> bool:
    """Returns whether the tokens are equal. The time that it takes does not reveal where they differ."""
    return secrets.compare_digest(given.encode(), token.encode())

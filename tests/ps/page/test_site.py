"""The page behind a real port: it answers, and never keeps its server from ending."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import struct
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hubring.ps.config.server import ServerConfig
from hubring.ps.core.bounds import Rejections
from hubring.ps.page import listener, routes
from hubring.ps.page.site import SHORTEST, StatusPage
from tests.support.pages.status_hub import TOKEN, StatusHub

pytestmark = pytest.mark.slow


@contextlib.asynccontextmanager
async def visited(
    rejections: Rejections | None = None, **settings: object
) -> AsyncIterator[tuple[StatusPage, StatusHub]]:
    """Serves a page for as long as it is visited."""
    site, hub = StatusPage(ServerConfig(port=0, page_public=True, **settings)), StatusHub()  # type: ignore[arg-type]
    try:
        await site.serve(hub.coordinator, hub.reporter, rejections)
        yield site, hub
    finally:
        await site.close()


async def dial(site: StatusPage, own: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = site.address.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port), local_addr=(own, 0))


async def ask(site: StatusPage, request: str, own: str = "127.0.0.1") -> bytes:
    """The whole answer on a line of its own."""
    reader, writer = await dial(site, own)
    writer.write(request.replace("\n", "\r\n").encode())
    answer = await reader.read()
    writer.close()
    return answer


async def test_the_page_answers_over_http() -> None:
    async with visited() as (site, hub):
        answer = await ask(site, "GET / HTTP/1.1\nHost: localhost\nConnection: close\n\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"4 workers train through the hub" in answer
        assert b"\r\ndate: " in answer
        assert b"uvicorn" not in answer.lower()
        silent = "POST /end HTTP/1.1\nHost: localhost\nConnection: close\nContent-Length: 0\n\n"
        refused = await ask(site, silent)
        assert refused.startswith(b"HTTP/1.1 403")
        assert hub.done == []


async def test_an_open_stream_ends_with_the_server(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with visited() as (site, _):
            reader, writer = await dial(site)
            writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"\n\n")
            idle_reader, idle = await dial(site)
        assert b"event: end" in await reader.read()
        assert await idle_reader.read() == b""
        for each in (writer, idle):
            each.close()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_the_log_of_its_server_is_on_the_page_until_it_closes() -> None:
    before = list(logging.getLogger().handlers)
    async with visited() as (site, _):
        logging.getLogger("hubring.ps.job.job").warning("rank 3 is <gone>")
        answer = await ask(site, "GET / HTTP/1.1\nHost: localhost\nConnection: close\n\n")
        assert b"rank 3 is &lt;gone&gt;" in answer
    assert logging.getLogger().handlers == before


async def test_its_port_is_free_again_once_it_is_closed() -> None:
    async with visited() as (site, _):
        pass
    again = StatusPage(ServerConfig(port=0, page_port=site.port))
    await again.close()


async def test_a_terminal_shows_a_drawn_token() -> None:
    site = StatusPage(ServerConfig(port=0), terminal=True)
    page, metrics = site.banner()
    assert f"page      {site.address}/#token=" in page
    assert metrics.split() == ["metrics", f"{site.address}/metrics"]
    await site.close()


async def test_a_log_names_a_file_with_the_token_that_only_this_user_can_read() -> None:
    site = StatusPage(ServerConfig(port=0))
    banner = "\n".join(site.banner())
    assert "#token=" not in banner
    file = Path(banner.partition("link with the token: ")[2].partition(")")[0])
    assert file.stat().st_mode & 0o777 == 0o600
    token = file.read_text().strip().removeprefix(f"{site.address}/#token=")
    assert len(token) >= SHORTEST
    assert token not in banner
    await site.close()
    assert not file.exists()


async def test_without_a_place_for_the_token_the_page_still_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may have made the folder, and a server with `--insecure` needs it for nothing else."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    (tmp_path / "hubring").mkdir(mode=0o755)

    site = StatusPage(ServerConfig(port=0))
    assert "to use its buttons, set --page-token-file" in site.banner()[0]
    await site.close()


async def test_the_banner_names_the_users_own_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    async with visited(page_token_file=file) as (site, _):
        assert TOKEN not in "".join(site.banner())
        assert str(file) in site.banner()[0]


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: local"])
async def test_a_silent_connection_is_closed_in_time(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(listener, "MOST_CONNECTIONS", 2)
    monkeypatch.setattr(listener, "SILENT_SECONDS", 1)
    async with visited() as (site, _):
        lines = [await dial(site) for _ in range(3)]
        for _, writer in lines:
            writer.write(said)
        # The last is one too many, the others say nothing, or half of it.
        for reader, writer in reversed(lines):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        answer = await ask(site, "GET / HTTP/1.1\nHost: localhost\nConnection: close\n\n")
        assert answer.startswith(b"HTTP/1.1 200")


async def test_half_a_form_is_refused_and_let_go(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "SILENT_SECONDS", 1)
    monkeypatch.setattr(routes, "FORM_SECONDS", 0.2)
    half = f"POST /end HTTP/1.1\nHost: localhost\nContent-Length: 99\n\ntoken={TOKEN}"
    async with visited() as (site, hub):
        _, writer = await dial(site)
        writer.write(half.encode())
        writer.close()
        answer = await ask(site, half)
        assert answer.startswith(b"HTTP/1.1 403")
        assert hub.done == []
    assert not caplog.records, "a client that goes leaves no traceback"


async def test_an_address_with_all_its_connections_keeps_no_other_one_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "SILENT_SECONDS", 3600)
    async with visited(rejections := Rejections()) as (site, _):
        lines = [await dial(site) for _ in range(listener.MOST_OF_ADDRESS + 1)]
        reader, _ = lines[-1]
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        assert rejections.counts() == {"connections": 1}
        request = "GET / HTTP/1.1\nHost: localhost\nConnection: close\n\n"
        assert (await ask(site, request, own="127.0.0.2")).startswith(b"HTTP/1.1 200")
        for _, writer in lines:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        answer = await ask(site, "GET / HTTP/1.1\nHost: localhost\nConnection: close\n\n")
        assert answer.startswith(b"HTTP")


async def test_a_client_that_does_not_read_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "SLOW_SECONDS", 0.1)
    async with visited(rejections := Rejections()) as (site, _):
        reader, writer = await dial(site)
        reader._transport.pause_reading()  # type: ignore[attr-defined]  # no public way in asyncio
        while not rejections.counts():
            with contextlib.suppress(ConnectionError):
                writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await asyncio.sleep(0)
        assert rejections.counts() == {"slow reader": 1}
        writer.close()


async def test_a_connection_that_is_not_http_is_counted_and_freed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "SILENT_SECONDS", 3600)
    seen: list[weakref.ref[object]] = []
    made = listener._Protocol.connection_made

    def note(protocol: listener._Protocol, transport: asyncio.Transport) -> None:
        seen.append(weakref.ref(protocol))
        made(protocol, transport)

    monkeypatch.setattr(listener._Protocol, "connection_made", note)
    async with visited(rejections := Rejections()) as (site, _):
        for _ in range(8):
            _, writer = await dial(site)
            never = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, never)
            writer.write(b"\0" * 50_000)
            await writer.drain()
            writer.transport.abort()  # a reset, which uvicorn does not clean up after
        while len(seen) < 8 or any(ref() is not None for ref in seen):
            gc.collect()
            await asyncio.sleep(0.01)
    assert rejections.counts()["message"] > 0
    assert "Invalid HTTP" not in caplog.text

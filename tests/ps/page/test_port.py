"""Where the page listens, and what is refused before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hubring.ps.config.sources import load_server
from hubring.ps.core.errors import ConfigError
from hubring.ps.page.site import choose_port, settle_page_token, take_port


@pytest.mark.parametrize(
    ("given", "control", "chosen"), [(None, 5555, 5556), (None, 0, 0), (8080, 5555, 8080), (0, 5555, 0)]
)
def test_without_a_port_it_is_the_one_after_the_control_port(
    given: int | None, control: int, chosen: int
) -> None:
    assert choose_port(given, control) == chosen


def test_after_the_last_port_there_is_none() -> None:
    with pytest.raises(ConfigError, match="set --page-port too"):
        choose_port(None, 65535)


def test_a_port_that_is_taken_is_reported_with_a_fix() -> None:
    with take_port("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} \(Address already in use\).*--no-page"):
            take_port("127.0.0.1", port)
    with take_port("127.0.0.1", port):
        pass


def test_a_client_that_connects_before_the_page_serves_waits() -> None:
    with (
        take_port("localhost", 0) as listening,
        socket.create_connection(listening.getsockname()[:2]) as early,
    ):
        early.sendall(b"GET / HTTP/1.1\r\n\r\n")
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.recv(3) == b"GET"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"no_page": True, "page_port": 8080}, "--page-port 8080 configures the status page"),
        ({"no_page": True, "page_token_file": Path("t")}, "--page-token-file t configures the status page"),
        ({"port": 5555, "page_port": 5555}, "--page-port 5555 is also the control port"),
        ({"page_port": 70000}, "a port from 0 to 65535"),
        ({"join": "127.0.0.1:5555", "page_port": 8080}, "--page-port is a setting of the coordinator"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_server(flags, environment={})


def test_a_drawn_token_is_long_and_never_the_same() -> None:
    drawn = {settle_page_token(None) for _ in range(20)}
    assert len(drawn) == 20
    assert min(map(len, drawn)) >= 24


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"short\n", "5 characters"),
        (b"\xff", "cannot read the page's token in .*check --page-token-file"),
    ],
)
def test_a_token_file_that_is_none_is_reported_with_a_fix(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=words):
        settle_page_token(file)


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a token that is long enough\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=f"other users can read the page's token in {file}"):
        settle_page_token(file)


def test_a_token_in_place_of_its_file_is_not_repeated() -> None:
    token = settle_page_token(None)
    with pytest.raises(ConfigError, match="--page-token-file names a file that does not exist") as refused:
        settle_page_token(Path(token))
    assert token not in str(refused.value)

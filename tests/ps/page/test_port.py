"""Where the page listens, and what is refused before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hubring.ps.core.errors import ConfigError
from hubring.ps.page.site import settle_page_token, take_port


def test_a_client_that_connects_before_the_page_serves_waits() -> None:
    with (
        take_port("localhost", 0) as listening,
        socket.create_connection(listening.getsockname()[:2]) as early,
    ):
        early.sendall(b"GET / HTTP/1.1\r\n\r\n")
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.recv(3) == b"GET"


def test_a_drawn_token_is_long_and_never_the_same() -> None:
    drawn = {settle_page_token(None) for _ in range(20)}
    assert len(drawn) == 20
    assert min(map(len, drawn)) >= 24


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (b"short\n", 0o600, "5 characters"),
        (b"\xff", 0o600, "cannot read the page's token in .*check --page-token-file"),
        (b"a token that is long enough\n", 0o644, "other users can read the page's token in .*token"),
    ],
)
def test_a_token_file_that_cannot_be_used_is_reported_with_a_fix(
    tmp_path: Path, content: bytes, mode: int, words: str
) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=words):
        settle_page_token(file)


def test_a_token_in_place_of_its_file_is_not_repeated() -> None:
    token = settle_page_token(None)
    with pytest.raises(ConfigError, match="--page-token-file names a file that does not exist") as refused:
        settle_page_token(Path(token))
    assert token not in str(refused.value)

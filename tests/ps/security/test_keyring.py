"""Two servers of one user on one port do not take each other's tokens away."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hubring.ps.core.errors import ConfigError
from hubring.ps.security import token_file
from hubring.ps.security.keyring import Keyring


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)


@pytest.fixture(name="port")
def _port() -> Iterator[int]:
    """A port on which a server listens at 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def found(port: int) -> object:
    """Returns what a client finds."""
    file = token_file.find_runtime_file(port)
    return None if file is None else token_file.read(file)


def test_a_server_at_another_address_of_the_port_keeps_its_tokens(port: int) -> None:
    first, second = Keyring(None), Keyring(None)
    first.publish(port, listens=True)
    with pytest.raises(ConfigError, match=f"another server of yours listens on port {port}"):
        second.publish(port)
    with (
        socket.create_server(("127.0.0.2", port)),
        pytest.raises(ConfigError, match=f"another server of yours listens on port {port}"),
    ):
        second.publish(port, listens=True)
    second.withdraw()
    assert found(port) == first.tokens


def test_a_server_without_tokens_leaves_those_of_another_address(port: int) -> None:
    keyring = Keyring(None)
    keyring.publish(port, listens=True)
    with socket.create_server(("127.0.0.2", port)):
        token_file.forget(port)
        assert found(port) == keyring.tokens
    token_file.forget(port)
    assert found(port) is None, "only one listens there"


@pytest.mark.parametrize("winner", [0, 1])
def test_of_two_servers_that_start_at_once_the_loser_leaves_the_winners_tokens(winner: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    both = Keyring(None), Keyring(None)
    for each in both:
        each.publish(port)
    both[1 - winner].withdraw(failed=True)
    assert found(port) == both[winner].tokens


def test_the_tokens_of_a_killed_server_are_replaced_and_do_not_come_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    Keyring(None).publish(port)
    next_one = Keyring(None)
    next_one.publish(port)
    assert found(port) == next_one.tokens
    next_one.withdraw()
    assert found(port) is None

"""Servers of one user keep each other's tokens; what killed servers left is deleted."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hubring.ps.config.environment import environment
from hubring.ps.core.errors import ConfigError
from hubring.ps.security import token_file
from hubring.ps.security.keyring import Keyring
from hubring.ps.security.token_file import OLD_SECONDS, network, runtime_file
from tests.support.processes.ports import free_port


@pytest.fixture(name="port")
def _port() -> Iterator[int]:
    """A port on which a server listens at 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def found(port: int) -> object:
    """Returns what a client finds."""
    file = token_file.find_runtime_file(port)
    return None if file is None else token_file.read_tokens(file)


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
    port = free_port()
    both = Keyring(None), Keyring(None)
    for each in both:
        each.publish(port)
    both[1 - winner].withdraw(failed=True)
    assert found(port) == both[winner].tokens


def test_the_tokens_of_a_killed_server_are_replaced_and_do_not_come_back() -> None:
    port = free_port()
    Keyring(None).publish(port)
    next_one = Keyring(None)
    next_one.publish(port)
    assert found(port) == next_one.tokens
    next_one.withdraw()
    assert found(port) is None


FREE = 1
"""A port on which nothing listens."""


@pytest.fixture(name="directory")
def _directory() -> Path:
    return runtime_file(FREE).parent


def left(directory: Path, name: str, age: float = 2 * OLD_SECONDS) -> Path:
    file = directory / name
    file.touch()
    os.utime(file, (time.time() - age,) * 2)
    return file


def test_old_files_without_a_listener_go(directory: Path) -> None:
    here = network()
    for kind in ("token", "page", "state", "state.4711.new", "token.x_y1z.new"):
        left(directory, f"{FREE}-{here}.{kind}")
    token_file.remove_old_files()
    assert list(directory.iterdir()) == []


def test_no_file_goes_that_may_be_needed(directory: Path) -> None:
    here = network()
    with (
        socket.create_server(("127.0.0.1", 0)) as four,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
    ):
        kept = [
            left(directory, f"{FREE}-{here}.token", OLD_SECONDS / 2),  # its server may be starting
            left(directory, f"{FREE}-{here + 1}.token"),  # of another network namespace
            left(directory, f"{four.getsockname()[1]}-{here}.token"),
            left(directory, f"{four.getsockname()[1]}-{here}.state"),
            left(directory, f"{six.getsockname()[1]}-{here}.page"),
            left(directory, "notes.token"),
            left(directory, f"{FREE}-{here}.key"),
        ]
        token_file.remove_old_files()
    assert sorted(directory.iterdir()) == sorted(kept)


def test_a_standby_keeps_the_files_of_its_server(directory: Path) -> None:
    """While it takes over, nothing listens."""
    state = left(directory, f"{FREE}-{network()}.state")
    token = left(directory, f"{FREE}-{network()}.token")
    variables = {**environment(), "HUBRING_COORDINATOR": f'{{"state":"{state}"}}'}
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as standby:
        assert standby.stdout is not None
        standby.stdout.readline()
        token_file.remove_old_files()
        assert sorted(directory.iterdir()) == sorted([state, token])
        standby.communicate(b"\n")
    token_file.remove_old_files()
    assert list(directory.iterdir()) == []


def test_a_directory_of_others_is_left_alone(directory: Path) -> None:
    left(directory, f"{FREE}-{network()}.token")
    directory.chmod(0o755)
    token_file.remove_old_files()
    assert len(list(directory.iterdir())) == 1
    directory.rename(directory.with_name("elsewhere"))
    token_file.remove_old_files()

"""What killed servers left is deleted, and nothing that a running one needs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hubring.ps.config.environment import environment
from hubring.ps.security import leftovers
from hubring.ps.security.leftovers import OLD_SECONDS
from hubring.ps.security.token_file import network, runtime_file

FREE = 1
"""A port on which nothing listens."""


@pytest.fixture(name="directory")
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
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
    leftovers.remove()
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
        leftovers.remove()
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
        leftovers.remove()
        assert sorted(directory.iterdir()) == sorted([state, token])
        standby.communicate(b"\n")
    leftovers.remove()
    assert list(directory.iterdir()) == []


def test_a_directory_of_others_is_left_alone(directory: Path) -> None:
    left(directory, f"{FREE}-{network()}.token")
    directory.chmod(0o755)
    leftovers.remove()
    assert len(list(directory.iterdir())) == 1
    directory.rename(directory.with_name("elsewhere"))
    leftovers.remove()

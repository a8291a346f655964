"""A folder of checkpoints takes one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hubring.ps.checkpoint import checkpoint_folder
from hubring.ps.checkpoint.lock import lock
from hubring.ps.core.errors import ConfigError


def test_a_claimed_directory_is_refused_to_other_processes_until_its_holder_ends(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys; from hubring.ps.checkpoint.lock import lock; lock(pathlib.Path(sys.argv[1]))"
    )

    def another() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    with lock(tmp_path):
        refused = another()
        assert refused.returncode == 1
        assert f"{tmp_path} is locked by {socket.gethostname()} pid {os.getpid()}" in refused.stderr
    assert another().returncode == 0


def test_a_claim_sweeps_nothing_that_another_process_is_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(*_: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    writing = checkpoint_folder.begin(tmp_path)
    monkeypatch.setattr(fcntl, "lockf", locked)
    with pytest.raises(ConfigError, match="is locked by another process"):
        lock(tmp_path)
    assert writing.is_dir()


def test_where_nothing_can_be_locked_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    lock(tmp_path).close()
    assert f"cannot lock {tmp_path} (No locks available)" in caplog.text

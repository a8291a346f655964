"""What tests of tokens and certificates share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the test's own folder, which no other user may use, the runtime directory."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def given_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], int]:
    """Lets a file belong to another user, whose number is returned."""

    def give(file: Path) -> int:
        user, fstat = os.getuid() + 7, os.fstat

        def theirs(descriptor: int) -> os.stat_result:
            status = list(fstat(descriptor))
            if os.readlink(f"/proc/self/fd/{descriptor}") == str(file):
                status[4] = user
            return os.stat_result(status)

        monkeypatch.setattr(os, "fstat", theirs)
        return user

    return give

"""Files that only their user can read, in folders where other users can do more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hubring.ps.core.errors import ConfigError, ServerUnreachable
from hubring.ps.security import private_file, token_file
from hubring.ps.security.access import check_token_file, find_access
from hubring.ps.security.certificate import load_certificate
from hubring.ps.security.guard import Role
from hubring.ps.security.keyring import Keyring, make_files
from tests.support.certificates import Authority
from tests.system.mishaps.mishap import like_anybody

DIGEST = "0123456789abcdef" * 4
AT = "127.0.0.1:1"

USES: dict[str, Callable[[Path], object]] = {
    "read": token_file.read_tokens,
    "client": lambda file: find_access(AT, Role.WORKER, file, 0.0),
    "early": lambda file: check_token_file(file, Role.WORKER),
    "server": Keyring,
}
uses = pytest.mark.parametrize("use", USES.values(), ids=USES)


@uses
def test_a_file_in_a_folder_that_cannot_be_searched_is_a_clear_error(tmp_path: Path, use: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot read the tokens in .*File name too long; check --token-file"
    ):
        use(tmp_path / ("a" * 300))  # as a folder of others, but also for root


@pytest.mark.slow
@pytest.mark.parametrize("words", [["start", "--port", "0"], ["status", AT]])
def test_a_file_in_a_folder_of_others_is_a_clear_error(tmp_path: Path, words: list[str]) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0)
    command = [*like_anybody(), sys.executable, "-m", "hubring.ps.cli", *words, "--token-file", f"{folder}/t"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"cannot read the tokens in {folder}/t: Permission denied; check --token-file" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.returncode == 78


@uses
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, use: Any) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match=r"cannot read the tokens in .*It is not a regular file"):
        use(tmp_path / "pipe")


def test_a_pipe_is_no_certificate(tmp_path: Path) -> None:
    files = Authority(tmp_path / "ours").sign("node1", "node1")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match=r"cannot read --tls-key .*It is not a regular file"):
        load_certificate(files._replace(key=tmp_path / "pipe"), serves=True)


def test_the_opened_files_permissions_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of a link can point it elsewhere after it was opened."""
    mounts = tmp_path / "secrets"
    mounts.mkdir()
    monkeypatch.setattr(private_file, "_MOUNTS", (str(mounts),))
    make_files(mounts / "tokens").chmod(0o644)
    make_files(tmp_path / "evil").chmod(0o644)
    link = tmp_path / "tokens"
    link.symlink_to(tmp_path / "evil")
    opened = os.open

    def swapped(path: Any, *rest: Any, **more: Any) -> int:
        descriptor = opened(path, *rest, **more)
        if path == link:
            link.unlink()
            link.symlink_to(mounts / "tokens")
        return descriptor

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(ConfigError, match="other users can read the tokens"):
        token_file.read_tokens(link)
    assert token_file.read_tokens(link)


def test_another_user_cannot_take_the_names_of_unfinished_files(tmp_path: Path) -> None:
    """In a folder like /tmp, this user could not remove them."""
    (tmp_path / f"tokens.{os.getpid()}.new").mkdir()
    (tmp_path / f"tokens.key.{os.getpid()}.new").mkdir()
    assert Keyring(tmp_path / "tokens").tokens


def test_a_write_that_fails_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    with pytest.raises(ConfigError, match=r"cannot write .*tokens: Is a directory"):
        private_file.write(tmp_path / "tokens", "text")
    with pytest.raises(RuntimeError), private_file._fresh(tmp_path / "tokens", b"text"):
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


def test_a_key_of_the_users_own_that_others_know_is_warned_of_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    given_away: Callable[[Path], int],
) -> None:
    files = Authority(tmp_path / "ours").sign("node1", "node1")
    assert files.key is not None
    for mode in (0o600, 0o640):
        files.key.chmod(mode)
        load_certificate(files, serves=True)
    assert caplog.text == ""
    files.key.chmod(0o644)
    with monkeypatch.context() as mounted:
        mounted.setattr(private_file, "_MOUNTS", (str(tmp_path),))
        load_certificate(files, serves=True)
    assert caplog.text == ""
    load_certificate(files, serves=True)
    load_certificate(files, serves=False)
    assert caplog.text.count("all users of this host can read the private key in --tls-key") == 1
    assert f"run: chmod 600 {files.key}" in caplog.text
    files.key.chmod(0o600)
    user = given_away(files.key)
    load_certificate(files, serves=True)
    assert f"belongs to another user, uid {user}, who knows it" in caplog.text


def test_the_file_of_a_server_that_has_ended_is_missing_as_the_server_is(tmp_path: Path) -> None:
    with pytest.raises(ServerUnreachable, match=r"no server listens at .*, and there is no .*gone"):
        find_access(AT, Role.WORKER, tmp_path / "gone", 0.1)

"""Tokens as text, and the files that hold them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hubring.ps.core.errors import ConfigError, ServerUnreachable, UsageError
from hubring.ps.security import private_file, token_file
from hubring.ps.security.access import Access, ShardLock, find_access
from hubring.ps.security.certificate import make_certificate
from hubring.ps.security.guard import HEADER, SCHEME, Role
from hubring.ps.security.keyring import Keyring, make_files, show_tokens
from hubring.ps.security.token_file import ROLES, choose_token, draw_tokens, parse_tokens
from hubring.ps.shard.host_shards import ShardSettings

DIGEST = "0123456789abcdef" * 4


def test_tokens_are_read_as_they_were_written_and_no_two_are_alike() -> None:
    tokens = draw_tokens(DIGEST)
    assert parse_tokens((str(token) for token in tokens.values()), "here") == tokens
    assert len({token.secret for token in tokens.values()}) == len(ROLES)
    assert draw_tokens(DIGEST) != draw_tokens(DIGEST)


@pytest.mark.parametrize(
    "line",
    [
        "secret",
        "hubring:worker:x:y",
        f"hubring:hub:{DIGEST}:{DIGEST}",
        f"hubring:nobody:{DIGEST}:{DIGEST}",
        f"hubring:worker::{DIGEST}",
        f"hubring:worker:{DIGEST}:{DIGEST[:-1]}",
        f"hubring:worker:{DIGEST}:{DIGEST}\x1b[31m",
    ],
)
def test_a_line_that_is_no_token_is_named_and_not_repeated(line: str) -> None:
    with pytest.raises(ConfigError, match="here, line 2, is no token") as refusal:
        parse_tokens([str(draw_tokens(DIGEST)[Role.READER]), line], "here")
    assert line not in str(refusal.value)


def test_no_representation_shows_a_secret() -> None:
    own = make_certificate()
    shard = ShardLock(identity=own)
    tokens = draw_tokens(own.digest)
    secrets = [token.secret for token in tokens.values()] + [shard.token, shard.secret]
    keys = [own.key.decode().splitlines()[1]]
    access = Access(tokens[Role.WORKER].secret, own.certificate)
    settings = ShardSettings("127.0.0.1:1", access=access)
    for each in (own, shard, shard.key, tokens, access, settings, list(tokens.values())):
        assert not [secret for secret in secrets + keys if secret in repr(each)], type(each)


def test_no_token_and_two_for_one_role_are_refused() -> None:
    with pytest.raises(ConfigError, match="here has no token"):
        parse_tokens(["", "  "], "here")
    with pytest.raises(ConfigError, match="line 2, is a second token for the role worker"):
        parse_tokens([str(draw_tokens(DIGEST)[Role.WORKER]), str(draw_tokens(DIGEST)[Role.WORKER])], "here")


def test_an_operator_and_a_worker_may_read_and_a_reader_no_more() -> None:
    tokens = draw_tokens(DIGEST)
    for role in (Role.READER, Role.OPERATOR, Role.WORKER):
        assert choose_token({role: tokens[role]}, Role.READER) == tokens[role]
    assert choose_token({Role.SHARD: tokens[Role.SHARD]}, Role.READER) is None
    assert choose_token({Role.READER: tokens[Role.READER]}, Role.WORKER) is None


def test_only_their_user_can_read_the_files(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    make_files(file)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "tokens": 0o600,
        "tokens.key": 0o600,
    }
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=f"other users can read the tokens in {file}; run: chmod 600"):
        token_file.read_tokens(file)


def test_a_path_through_the_folder_for_mounted_secrets_is_no_mounted_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "secrets"
    mounts.mkdir()
    monkeypatch.setattr(private_file, "_MOUNTS", (str(mounts),))
    for folder in (mounts, tmp_path):
        make_files(folder / "tokens").chmod(0o644)
    assert token_file.read_tokens(mounts / "tokens")
    with pytest.raises(ConfigError, match="other users can read the tokens"):
        token_file.read_tokens(mounts / ".." / "tokens")


def test_files_of_another_user_and_a_key_that_others_can_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_away: Callable[[Path], int]
) -> None:
    file, key = make_files(tmp_path / "tokens"), tmp_path / "tokens.key"
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=f"other users can read the private key in {key}; run: chmod 600"):
        Keyring(file)
    key.chmod(0o600)
    user = given_away(key)
    with pytest.raises(ConfigError, match=rf"uid {user}, who knows the private key .* delete {file} and"):
        Keyring(file)
    user = given_away(file)
    here = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: here)
    with pytest.raises(
        ConfigError, match=f"belongs to another user, uid {user}, who knows the tokens"
    ) as refusal:
        token_file.read_tokens(file)
    assert "chown" not in str(refusal.value)
    assert "delete it, so that the server makes new tokens; or copy the server's file again" in str(
        refusal.value
    )


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        token_file.read_tokens(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(ConfigError, match="it is not text"):
        token_file.read_tokens(tmp_path / "binary")
    with pytest.raises(ConfigError, match="use a file in a writable folder"):
        token_file.write_tokens(tmp_path / "no" / "folder", draw_tokens(DIGEST))


def test_the_runtime_directory_is_this_users_own(tmp_path: Path) -> None:
    file = token_file.runtime_file(5555)
    assert file.parent == tmp_path / "hubring"
    assert file.parent.stat().st_mode & 0o777 == 0o700
    file.parent.chmod(0o755)
    with pytest.raises(
        ConfigError, match=f"is open to other users; run: chmod 700 {file.parent}, or set XDG"
    ):
        token_file.runtime_file(5555)
    file.parent.rmdir()
    file.parent.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is not a directory; remove it, or set XDG_RUNTIME_DIR"):
        token_file.runtime_file(5555)


def test_a_directory_that_another_user_took_is_left_for_one_in_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In /tmp, only its owner and root can remove it."""
    home, taken = tmp_path / "home", tmp_path / f"hubring-{os.getuid()}"
    taken.mkdir(mode=0o700)
    lstat, others = os.lstat, {Path(f"/run/user/{os.getuid()}")}

    def seen(path: Path) -> os.stat_result:
        status = list(lstat(path))
        status[4] += path in others
        return os.stat_result(status)

    monkeypatch.setattr(os, "lstat", seen)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert token_file.runtime_file(5555).parent == taken
    others.add(taken)
    made = token_file.runtime_file(5555)
    assert made.parent.parent == home / ".cache"
    others.remove(taken)  # its owner removes it, and clients look where the server is
    assert token_file.runtime_file(5555) == made


def test_looking_for_tokens_makes_no_directory_and_trusts_none_of_others(tmp_path: Path) -> None:
    """Another user may have made it."""
    with pytest.raises(ServerUnreachable):
        find_access("127.0.0.1:1", Role.WORKER, None, 0.0)
    assert not (tmp_path / "hubring").exists()
    file = token_file.runtime_file(1)
    token_file.write_tokens(file, draw_tokens(DIGEST))
    assert token_file.find_runtime_file(1) == file
    file.parent.chmod(0o755)
    assert token_file.find_runtime_file(1) is None
    with pytest.raises(ServerUnreachable):
        find_access("127.0.0.1:1", Role.WORKER, None, 0.0)


def test_a_server_with_a_file_makes_it_once_and_leaves_it(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    first = Keyring(file)
    first.publish(5555)
    first.withdraw()
    again = Keyring(file)
    assert (again.tokens, again.identity) == (first.tokens, first.identity)
    (tmp_path / "tokens.key").unlink()
    with pytest.raises(ConfigError, match="needs the private key of its certificate beside"):
        Keyring(file)
    make_files(tmp_path / "other")
    (tmp_path / "other.key").rename(tmp_path / "tokens.key")
    with pytest.raises(ConfigError, match="are for another certificate"):
        Keyring(file)


def test_a_certificate_of_the_users_own_has_its_key_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, own, renewed = tmp_path / "tokens", make_certificate(), make_certificate()
    first = Keyring(file, own)
    first.publish(5555)
    assert {token.digest for token in first.tokens.values()} == {own.digest}
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]
    assert Keyring(file, own).identity == own
    assert caplog.text == ""
    again = Keyring(file, renewed)
    assert (again.tokens, again.identity) == (first.tokens, renewed)
    assert "clients that use a copy of them need --tls-ca" in caplog.text


def test_servers_that_start_at_once_with_a_new_file_share_its_tokens_and_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds no file at first."""
    file, others = tmp_path / "tokens", list[Keyring]()
    create = private_file.create

    def overtaken(path: Path, text: str) -> None:
        monkeypatch.setattr(private_file, "create", create)
        if not others:
            others.append(Keyring(file))
            others[0].publish(5555)
        create(path, text)

    monkeypatch.setattr(private_file, "create", overtaken)
    late = Keyring(file)
    late.publish(5556)
    (first,) = others
    assert (late.tokens, late.identity) == (first.tokens, first.identity)
    assert token_file.read_tokens(file) == first.tokens
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokens", "tokens.key"]
    call = "/hubring.v1.Control/Join", [(HEADER, SCHEME + first.tokens[Role.WORKER].secret)]
    assert late.guard.objection(*call) == ""


def test_rotation_that_cannot_write_changes_no_token(tmp_path: Path) -> None:
    folder = tmp_path / "secret"
    folder.mkdir()
    keyring = Keyring(folder / "tokens")
    keyring.publish(5555)
    before = dict(keyring.tokens)
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=r"were not rotated: cannot write .* submit the job again"):
        keyring.rotate()
    assert keyring.tokens == before
    call = "/hubring.v1.Control/RotateToken", [(HEADER, SCHEME + before[Role.OPERATOR].secret)]
    assert keyring.guard.objection(*call) == ""


def test_tokens_are_shown_by_role(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_files(tmp_path / "tokens")
    tokens = token_file.read_tokens(tmp_path / "tokens")
    assert show_tokens(None, tmp_path / "tokens", "worker", None) is None
    assert capsys.readouterr().out == f"{tokens[Role.WORKER]}\n"
    show_tokens(None, tmp_path / "tokens", "", None)
    assert capsys.readouterr().out.splitlines() == [str(token) for token in tokens.values()]


def test_tokens_are_written_to_a_file_that_no_other_user_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_files(tmp_path / "tokens")
    output, mask = tmp_path / "worker", os.umask(0)
    try:
        assert show_tokens(None, tmp_path / "tokens", "worker", output) == {"tokens": str(output)}
    finally:
        os.umask(mask)
    assert capsys.readouterr().out == ""
    assert output.stat().st_mode & 0o777 == 0o600
    tokens = token_file.read_tokens(tmp_path / "tokens")
    assert token_file.read_tokens(output) == {Role.WORKER: tokens[Role.WORKER]}
    show_tokens(None, tmp_path / "tokens", "reader", output)
    assert token_file.read_tokens(output) == {Role.READER: tokens[Role.READER]}
    link = tmp_path / "link"
    link.symlink_to("/dev/stdout")
    for place in (link, tmp_path):
        with pytest.raises(UsageError, match="is no regular file, and would be replaced"):
            show_tokens(None, tmp_path / "tokens", "", place)


def test_showing_the_tokens_of_no_server_makes_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this user runs no server with tokens at"):
        show_tokens("127.0.0.1:1", None, "", None)
    token_file.forget(1)
    assert list(tmp_path.iterdir()) == []
    keyring = Keyring(None)
    keyring.publish(1)
    assert show_tokens("127.0.0.1:1", None, "worker", tmp_path / "copy") is not None

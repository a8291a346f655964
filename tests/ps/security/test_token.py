"""Tokens as text, and the files that hold them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from hubring.ps.core.errors import ConfigError, ServerUnreachable, UsageError
from hubring.ps.security import private_file, token_file
from hubring.ps.security.access import Access, find
from hubring.ps.security.certificate import make
from hubring.ps.security.commands import show
from hubring.ps.security.door import lock
from hubring.ps.security.guard import HEADER, SCHEME
from hubring.ps.security.keyring import Keyring, make_files
from hubring.ps.security.policy import Role
from hubring.ps.security.token import ROLES, choose, draw, parse
from hubring.ps.shard.spawn import Settings

DIGEST = "0123456789abcdef" * 4


def test_tokens_are_read_as_they_were_written_and_no_two_are_alike() -> None:
    tokens = draw(DIGEST)
    assert parse((str(token) for token in tokens.values()), "here") == tokens
    assert len({token.secret for token in tokens.values()}) == len(ROLES)
    assert draw(DIGEST) != draw(DIGEST)


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
        parse([str(draw(DIGEST)[Role.READER]), line], "here")
    assert line not in str(refusal.value)


def test_no_representation_shows_a_secret() -> None:
    own, shard = make(), lock(tls=True, curve=True)
    assert shard.curve is not None
    tokens = draw(own.digest)
    secrets = [token.secret for token in tokens.values()] + [shard.token, shard.secret, shard.curve[0]]
    keys = [own.key.decode().splitlines()[1]]
    access = Access(tokens[Role.WORKER].secret, own.certificate)
    settings = Settings("127.0.0.1:1", access=access)
    for each in (own, shard, shard.door, tokens, access, settings, list(tokens.values())):
        assert not [secret for secret in secrets + keys if secret in repr(each)], type(each)


def test_no_token_and_two_for_one_role_are_refused() -> None:
    with pytest.raises(ConfigError, match="here has no token"):
        parse(["", "  "], "here")
    with pytest.raises(ConfigError, match="line 2, is a second token for the role worker"):
        parse([str(draw(DIGEST)[Role.WORKER]), str(draw(DIGEST)[Role.WORKER])], "here")


def test_an_operator_and_a_worker_may_read_and_a_reader_no_more() -> None:
    tokens = draw(DIGEST)
    for role in (Role.READER, Role.OPERATOR, Role.WORKER):
        assert choose({role: tokens[role]}, Role.READER) == tokens[role]
    assert choose({Role.SHARD: tokens[Role.SHARD]}, Role.READER) is None
    assert choose({Role.READER: tokens[Role.READER]}, Role.WORKER) is None


def test_only_their_user_can_read_the_files(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    make_files(file)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "tokens": 0o600,
        "tokens.key": 0o600,
    }
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=f"other users can read the tokens in {file}; run: chmod 600"):
        token_file.read(file)


def test_a_path_through_the_folder_for_mounted_secrets_is_no_mounted_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "secrets"
    mounts.mkdir()
    monkeypatch.setattr(private_file, "_MOUNTS", (str(mounts),))
    for folder in (mounts, tmp_path):
        make_files(folder / "tokens").chmod(0o644)
    assert token_file.read(mounts / "tokens")
    with pytest.raises(ConfigError, match="other users can read the tokens"):
        token_file.read(mounts / ".." / "tokens")


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tokens"
    make_files(file)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    status = os.stat_result((0o100600, 1, 1, 1, user + 7, 1, 1, 1, 1, 1))
    monkeypatch.setattr(os, "fstat", lambda descriptor: status)
    with pytest.raises(
        ConfigError, match=f"belongs to another user, uid {user + 7}, who knows the tokens"
    ) as refusal:
        token_file.read(file)
    assert "chown" not in str(refusal.value)
    assert "delete it, so that the server makes new tokens; or copy the server's file again" in str(
        refusal.value
    )


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        token_file.read(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(ConfigError, match="it is not text"):
        token_file.read(tmp_path / "binary")
    with pytest.raises(ConfigError, match="use a file in a writable folder"):
        token_file.write_tokens(tmp_path / "no" / "folder", draw(DIGEST))


def test_the_runtime_directory_is_this_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
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


def test_a_directory_that_another_user_took_cannot_be_removed_so_another_one_is_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In /tmp, only its owner and root can."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    user = os.getuid()
    (tmp_path / f"hubring-{user + 1}").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(ConfigError) as refusal:
        token_file.runtime_file(5555)
    words = (
        f"belongs to another user, uid {user}; set XDG_RUNTIME_DIR to a directory of your own, or use --token"
    )
    assert words in str(refusal.value)
    assert "administrator" in str(refusal.value)


def test_looking_for_tokens_makes_no_directory_and_trusts_none_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may have made it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    with pytest.raises(ServerUnreachable):
        find("127.0.0.1:1", Role.WORKER, None, 0.0)
    assert not (tmp_path / "hubring").exists()
    file = token_file.runtime_file(1)
    token_file.write_tokens(file, draw(DIGEST))
    assert token_file.find_runtime_file(1) == file
    file.parent.chmod(0o755)
    assert token_file.find_runtime_file(1) is None
    with pytest.raises(ServerUnreachable):
        find("127.0.0.1:1", Role.WORKER, None, 0.0)


def test_a_server_without_a_file_has_new_tokens_and_takes_them_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    first = Keyring(None)
    first.publish(5555)
    assert first.path is not None
    assert token_file.read(first.path) == first.tokens
    second = Keyring(None)
    second.publish(5555)
    first.withdraw()
    assert token_file.read(first.path) == second.tokens != first.tokens
    second.withdraw()
    assert not first.path.exists()


def test_a_server_without_tokens_deletes_those_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of this user would ask it for the certificate of the earlier one."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    killed = Keyring(None)
    killed.publish(5555)
    token_file.forget(5556)
    assert token_file.runtime_file(5555).exists()
    token_file.forget(5555)
    token_file.forget(5555)
    assert not token_file.runtime_file(5555).exists()


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
    file, own, renewed = tmp_path / "tokens", make(), make()
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
    assert token_file.read(file) == first.tokens
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokens", "tokens.key"]
    call = "/hubring.v1.Control/Join", [(HEADER, SCHEME + first.tokens[Role.WORKER].secret)]
    assert late.guard.objection(*call) == ""


def test_rotation_writes_new_tokens_for_the_same_certificate(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path / "tokens")
    keyring.publish(5555)
    before = dict(keyring.tokens)
    keyring.rotate()
    after = token_file.read(tmp_path / "tokens")
    assert all(after[role].digest == before[role].digest for role in ROLES)
    assert all(after[role].secret != before[role].secret for role in ROLES)


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
    tokens = token_file.read(tmp_path / "tokens")
    assert show(None, tmp_path / "tokens", "worker", None) is None
    assert capsys.readouterr().out == f"{tokens[Role.WORKER]}\n"
    show(None, tmp_path / "tokens", "", None)
    assert capsys.readouterr().out.splitlines() == [str(token) for token in tokens.values()]


def test_tokens_are_written_to_a_file_that_no_other_user_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_files(tmp_path / "tokens")
    output, mask = tmp_path / "worker", os.umask(0)
    try:
        assert show(None, tmp_path / "tokens", "worker", output) == {"tokens": str(output)}
    finally:
        os.umask(mask)
    assert capsys.readouterr().out == ""
    assert output.stat().st_mode & 0o777 == 0o600
    tokens = token_file.read(tmp_path / "tokens")
    assert token_file.read(output) == {Role.WORKER: tokens[Role.WORKER]}
    show(None, tmp_path / "tokens", "reader", output)
    assert token_file.read(output) == {Role.READER: tokens[Role.READER]}
    link = tmp_path / "link"
    link.symlink_to("/dev/stdout")
    for place in (link, tmp_path):
        with pytest.raises(UsageError, match="is no regular file, and would be replaced"):
            show(None, tmp_path / "tokens", "", place)


def test_showing_the_tokens_of_no_server_makes_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigError, match="this user runs no server with tokens at"):
        show("127.0.0.1:1", None, "", None)
    token_file.forget(1)
    assert list(tmp_path.iterdir()) == []
    keyring = Keyring(None)
    keyring.publish(1)
    assert show("127.0.0.1:1", None, "worker", tmp_path / "copy") is not None


def test_a_private_key_that_others_can_read_is_refused_unless_an_engine_mounted_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_files(tmp_path / "tokens")
    key = tmp_path / "tokens.key"
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=f"other users can read the private key in {key}; run: chmod 600"):
        Keyring(file)
    with monkeypatch.context() as mounted:
        mounted.setattr(private_file, "_MOUNTS", (str(tmp_path),))
        assert Keyring(file).tokens == token_file.read(file)
    key.chmod(0o600)
    user, fstat = os.getuid(), os.fstat

    def theirs(descriptor: int) -> os.stat_result:
        status = list(fstat(descriptor))
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(key):
            status[4] = user + 7
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", theirs)
    with pytest.raises(ConfigError, match=rf"uid {user + 7}, who knows the private key .* delete {file} and"):
        Keyring(file)

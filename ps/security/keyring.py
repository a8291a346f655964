"""The tokens and the certificate of one server, from its start to its end, and `ps-server token show`."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hubring.ps.config.values import address as split
from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.security import certificate, private_file
from hubring.ps.security import token_file as files
from hubring.ps.security.access import Access
from hubring.ps.security.certificate import Identity, OwnCertificate, first_certificate
from hubring.ps.security.guard import Guard, Role
from hubring.ps.security.token_file import ROLES, Tokens, draw_tokens

log = logging.getLogger(__name__)


class KeyringContent(NamedTuple):
    """A keyring's contents, for the process that takes over its server."""

    tokens: Tokens
    identity: Identity
    former: Sequence[Mapping[Role, str]]
    """The secrets before each rotation."""


class Keyring:
    """Makes or reads a server's tokens.

    Args:
        file: The file of the tokens, which are used if they are there already; None for a new file in the
            user's runtime directory, named after the port.
        own: A certificate that the server's user brings; None for one that is made, and kept beside `file`.
        kept: What the keyring had in another process, if this one takes over its server.

    Attributes:
        guard: Checks the calls of a server.
        identity: The certificate and its key.
        path: Where the tokens are; None before `publish`.

    Raises:
        ConfigError: The file cannot be used, or its certificate is missing or another one.
    """

    def __init__(
        self, file: Path | None, own: Identity | None = None, kept: KeyringContent | None = None
    ) -> None:
        self._file = file
        self._own = own
        if kept is not None:
            self.tokens, self.identity = kept.tokens, kept.identity
        elif file is not None:
            if not private_file.exists(file, files.FILE_OPTION):
                _make_missing(file, own)
            self.tokens = files.read_tokens(file)
            self.identity = own or self._read_identity(file)
            if own is not None and not self._fit(own):
                log.warning(
                    "the tokens in %s were made for another certificate than --tls-cert: clients that use a"
                    " copy of them need --tls-ca",
                    file,
                )
        else:
            self.identity = own or certificate.make_certificate()
            self.tokens = draw_tokens(self.identity.digest)
        self.guard = Guard(_secrets(self.tokens), kept.former if kept is not None else ())
        self.path: Path | None = None
        self._earlier = ""

    @property
    def kept(self) -> KeyringContent:
        """The contents."""
        return KeyringContent(self.tokens, self.identity, self.guard.former)

    def secret(self, role: Role) -> str:
        """Returns the current secret of a role; empty if the server's file has none for it."""
        return self.tokens[role].secret if role in self.tokens else ""

    def unix_socket(self, port: int, own: OwnCertificate) -> str:
        """Returns where processes of this user on this host find the server on a port; empty: they use TCP.

        Those do that are given a token file, or need a certificate of an authority.
        """
        return "" if self._file is not None or own.authority else files.socket_place(port, files.CONTROL)

    def shards_access(self, port: int, own: OwnCertificate) -> Access:
        """Returns how this host's shards reach the server on a port."""
        shown, there = first_certificate(self.identity.certificate), self.identity.name
        return Access(self.secret(Role.SHARD), shown, there, own.shown, self.unix_socket(port, own))

    def publish(self, port: int, *, listens: bool = False) -> None:
        """Writes the tokens, for the clients of a server on this port.

        Args:
            port: The server's.
            listens: Whether the server listens there already.

        Raises:
            ConfigError: Another server of this user listens on this port, or the file cannot be written.
        """
        path = self._file or files.runtime_file(port)
        if self._file is None:
            earlier = _file_text(path)
            if earlier not in ("", self._text) and files.listening()[port] > listens:
                raise ConfigError(
                    f"another server of yours listens on port {port} at another address, and both would"
                    f" write their tokens to {path}; use another port, or name a file with --token-file"
                )
            self._earlier = earlier
            files.write_tokens(path, self.tokens)
        self.path = path

    def rotate(self) -> None:
        """Replaces the tokens. Workers and shards that joined stay.

        Raises:
            ConfigError: The file cannot be written. The tokens stay as they are.
        """
        assert self.path is not None
        fresh = draw_tokens(self.identity.digest)
        try:
            files.write_tokens(self.path, fresh)
        except ConfigError as error:
            raise ConfigError(
                f"the tokens were not rotated: {error}. A mounted Secret cannot change while the server runs:"
                " submit the job again, which makes a new one"
            ) from error
        self.tokens = fresh
        self.guard.rotate(_secrets(fresh))

    def withdraw(self, *, failed: bool = False) -> None:
        """Deletes the tokens of a server that ends, unless its user has named their file.

        Args:
            failed: Whether the server could not begin to listen. The file then gets its earlier tokens back:
                they may be those of a server that began at the same time.
        """
        if self._file is None and self.path is not None:
            with contextlib.suppress(OSError, ConfigError):
                if _file_text(self.path) != self._text:  # those of a later server on this port
                    return
                if failed and self._earlier:
                    private_file.write(self.path, self._earlier)
                else:
                    self.path.unlink()

    @property
    def _text(self) -> str:
        return files.text_of(self.tokens)

    def _fit(self, identity: Identity) -> bool:
        return {token.digest for token in self.tokens.values()} == {identity.digest}

    def _read_identity(self, file: Path) -> Identity:
        identity = _identity_beside(file)
        if not self._fit(identity):
            raise ConfigError(
                f"the tokens in {file} are for another certificate than the one in {_key_file(file)}"
            )
        return identity


def _file_text(file: Path) -> str:
    """Returns the text of a file with tokens; empty if there is none, or it cannot be used."""
    try:
        return files.text_of(files.read_tokens(file))
    except ConfigError:
        return ""


def _make_missing(file: Path, own: Identity | None) -> None:
    """Makes a file with new tokens, unless there is one; also the certificate beside it, unless there is one.

    Of several servers that start with one file, all use what the first wrote.
    """
    if own is None:
        made = certificate.make_certificate()
        private_file.create(_key_file(file), _pem(made))
    private_file.create(file, files.text_of(draw_tokens((own or _identity_beside(file)).digest)))


def _identity_beside(file: Path) -> Identity:
    key = _key_file(file)
    try:
        identity = certificate.split_pem(private_file.read(key, "the private key", _renewal(file)))
        certificate.check_key(identity)
    except OSError as error:
        raise ConfigError(
            f"the server needs the private key of its certificate beside {file}, but cannot read {key}:"
            f" {error.strerror}; {_renewal(file)}"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{key}, the certificate of the tokens in {file}, is damaged: {error}; {_renewal(file)}"
        ) from error
    return identity


def _renewal(file: Path) -> str:
    return f"delete {file} and {_key_file(file)}, so that the server makes new ones"


def make_files(file: Path) -> Path:
    """Writes new tokens with a new certificate, for engines that copy them before the server starts.

    Returns:
        The file of the tokens. The certificate and its key are beside it.
    """
    identity = certificate.make_certificate()
    private_file.write(_key_file(file), _pem(identity))
    files.write_tokens(file, draw_tokens(identity.digest))
    return file


def _secrets(tokens: Tokens) -> dict[Role, str]:
    return {role: token.secret for role, token in tokens.items()}


def _key_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.key")


def _pem(identity: Identity) -> str:
    return (identity.certificate + identity.key).decode()


def show_tokens(
    server: str | None, file: Path | None, role: str, output: Path | None
) -> dict[str, str] | None:
    """Prints the tokens of this user's server on this host, or those in a file.

    Args:
        server: The server's `HOST:PORT`; not needed with `file`.
        file: A file with tokens; None for that of the server.
        role: Shows only the token of this role; empty for all.
        output: A file that gets the tokens, and that only this user can read; None: prints them.

    Returns:
        The result for the last line; None if the tokens were printed.

    Raises:
        UsageError: The role is unknown, or neither a server nor a file is given.
        ConfigError: There are no tokens, or the output cannot be written.
    """
    if role and role not in ROLES:
        raise UsageError(f"--role {role} is no role; use {', '.join(ROLES)}")
    if file is None:
        if server is None:
            raise UsageError("name the server, HOST:PORT, or its --token-file")
        file = files.find_runtime_file(split(server)[1])
        if file is None:
            raise ConfigError(
                f"this user runs no server with tokens at {server} on this host; name the file in the"
                " server's banner with --token-file"
            )
    found = files.read_tokens(file)
    wanted = [Role(role)] if role else list(found)
    for each in wanted:
        if each not in found:
            raise ConfigError(f"{file} has no token for the role {each}")
    chosen = {each: found[each] for each in wanted}
    if output is not None:
        if os.path.lexists(output) and (output.is_symlink() or not output.is_file()):
            raise UsageError(f"--output {output} is no regular file, and would be replaced; use another name")
        files.write_tokens(output, chosen)
        return {"tokens": str(output)}
    print(files.text_of(chosen), end="")
    return None

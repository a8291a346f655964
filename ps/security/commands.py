"""`ps-server token show`."""

from __future__ import annotations

from pathlib import Path

from hubring.ps.config.address import address as split
from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.security import token_file as files
from hubring.ps.security.policy import Role
from hubring.ps.security.token import ROLES


def show(server: str | None, file: Path | None, role: str) -> int:
    """Prints the tokens of this user's server on this host, or those in a file; returns the exit code.

    Raises:
        UsageError: The role is unknown, or neither a server nor a file is given.
        ConfigError: There are no tokens.
    """
    if role and role not in ROLES:
        raise UsageError(f"--role {role} is no role; use {', '.join(ROLES)}")
    if file is None:
        if server is None:
            raise UsageError("name the server, HOST:PORT, or its --token-file")
        file = files.runtime_file(split(server)[1])
        if not file.exists():
            raise ConfigError(
                f"this user runs no server with tokens at {server} on this host: {file} does not exist"
            )
    found = files.read(file)
    wanted = [Role(role)] if role else list(found)
    for each in wanted:
        if each not in found:
            raise ConfigError(f"{file} has no token for the role {each}")
        print(found[each])
    return 0

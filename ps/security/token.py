"""Join tokens: one string with a role, the digest of the server's certificate, and the role's secret.

    hubring:worker:8d1f...:4be0...

The digest proves the server to its clients, also on one host: any user may take a port that a server has
left. No secret is sent before.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hubring.ps.core.errors import ConfigError
from hubring.ps.security.policy import Role

ROLES = (Role.WORKER, Role.SHARD, Role.READER, Role.OPERATOR)
"""Roles that a token can have."""

_TOKEN = re.compile(r"hubring:([a-z]+):([0-9a-f]{64}):([0-9a-f]{64})")


class Token(NamedTuple):
    """A secret for one role.

    Attributes:
        role: What it lets its holder do.
        digest: SHA-256 of the server's certificate, in hexadecimal.
        secret: 256 random bits, in hexadecimal.
    """

    role: Role
    digest: str
    secret: str

    def __repr__(self) -> str:
        return f"Token({self.role}, digest={self.digest!r})"  # logs and errors must not show a secret

    def __str__(self) -> str:
        return f"hubring:{self.role}:{self.digest}:{self.secret}"


Tokens = Mapping[Role, Token]
"""One token for each of some roles."""


def draw(digest: str) -> Tokens:
    """Returns new tokens for all roles."""
    return {role: Token(role, digest, secrets.token_hex(32)) for role in ROLES}


def parse(lines: Iterable[str], where: str) -> Tokens:
    """Returns the tokens in some lines.

    Raises:
        ConfigError: A line is no token, two have one role, or there is none. Does not repeat the line.
    """
    tokens: dict[Role, Token] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        found = _TOKEN.fullmatch(line.strip())
        if found is None or found[1] not in ROLES:
            raise ConfigError(
                f"{where}, line {number}, is no token; expected hubring:ROLE:DIGEST:SECRET, as"
                " `ps-server token show` prints it"
            )
        role = Role(found[1])
        if role in tokens:
            raise ConfigError(f"{where}, line {number}, is a second token for the role {role}; keep one")
        tokens[role] = Token(role, found[2], found[3])
    if not tokens:
        raise ConfigError(f"{where} has no token; copy one that `ps-server token show` prints")
    return tokens


def choose(tokens: Tokens, role: Role) -> Token | None:
    """Returns the token to act in a role; None if there is none. An operator may also read."""
    wanted = (role, Role.OPERATOR, Role.WORKER) if role is Role.READER else (role,)
    return next((tokens[each] for each in wanted if each in tokens), None)

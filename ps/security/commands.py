"""`ps-server token show`."""

from __future__ import annotations

import os
from pathlib import Path

from hubring.ps.config.address import address as split
from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.security import token_file as files
from hubring.ps.security.policy import Role
from hubring.ps.security.token import ROLES


def show(server: str | None, file: Path | None, role: str, output: Path | None) -> dict[str, str] | None:
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
    found = files.read(file)
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

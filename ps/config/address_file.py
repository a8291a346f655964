"""The file of `--address-file`, which scripts read to find a server."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from hubring.ps.core.errors import ConfigError


def write(path: Path, address: str) -> None:
    """Writes a server's `HOST:PORT`; a reader never sees a partial file.

    Raises:
        ConfigError: The file cannot be written.
    """
    # In a folder like /tmp, other users could take a name that they can guess, and keep it.
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    try:
        with fresh.open("x") as file:
            file.write(address + "\n")
        fresh.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise ConfigError(
            f"cannot write --address-file {path}: {error.strerror}; use a path in a writable folder"
        ) from error

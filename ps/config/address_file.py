"""The file of `--address-file`, which scripts read to find a server."""

from __future__ import annotations

from pathlib import Path

from hubring.ps.core.errors import ConfigError


def write(path: Path, address: str) -> None:
    """Writes a server's `HOST:PORT`; a reader never sees a partial file.

    Raises:
        ConfigError: The file cannot be written.
    """
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.unlink(missing_ok=True)
        with fresh.open("x") as file:  # a new file: another user's link would name a file to overwrite
            file.write(address + "\n")
        fresh.rename(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write --address-file {path}: {error.strerror}; use a path in a writable folder"
        ) from error

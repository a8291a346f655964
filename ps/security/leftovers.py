"""Deletes what killed servers left in the user's runtime directory: tokens, page links and states.

Law: no file goes that a running server, or a standby that takes over, may need. A file is deleted only if it
is older than a day, its port has no listener in this network namespace, and no process of this user names it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from hubring.ps.security.token_file import is_private, listening, network, runtime_directory

log = logging.getLogger(__name__)

OLD_SECONDS = 86400.0
"""A server that starts writes its files before it listens."""

_NAME = re.compile(r"(?P<port>[0-9]{1,5})-(?P<network>[0-9]+)\.(token|page|state)(\.[^.]+\.new)?")


def remove() -> None:
    """Deletes the files, if the directory is this user's own."""
    directory = runtime_directory()
    if not is_private(directory):
        return
    try:
        old = list(_old(directory))
        if not old:
            return
        occupied, named = listening(), _environments()
    except OSError as error:
        log.info("files of killed servers stay in %s: %s", directory, error)
        return
    for file, port in old:
        stem = f"{directory / file.name.partition('.')[0]}."  # those of one server stay together
        with contextlib.suppress(OSError):
            # A server may have started on this port since, and have replaced the file.
            if port not in occupied and stem.encode() not in named and _is_old(file):
                file.unlink()


def _old(directory: Path) -> Iterator[tuple[Path, int]]:
    """Yields the old files of this network namespace, and their ports."""
    here = str(network())
    for file in directory.iterdir():
        found = _NAME.fullmatch(file.name)
        if found is None or found["network"] != here:
            continue
        with contextlib.suppress(FileNotFoundError):  # another server also cleans up
            if _is_old(file):
                yield file, int(found["port"])


def _is_old(file: Path) -> bool:
    return time.time() - file.lstat().st_mtime > OLD_SECONDS


def _environments() -> bytes:
    """Returns the environments of this user's processes: a standby's has the name of the state file."""
    found = []
    for process in os.listdir("/proc"):
        if process.isdigit():
            with contextlib.suppress(OSError):  # it ended, or is another user's
                found.append(Path(f"/proc/{process}/environ").read_bytes())
    return b"\0".join(found)

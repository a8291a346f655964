"""The lock of a checkpoint directory: only one process at a time writes to it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import TextIO

from hubring.ps.checkpoint.checkpoint_folder import begin, unwritable
from hubring.ps.core.errors import ConfigError

log = logging.getLogger(__name__)

_FILE = ".claim"


def lock(directory: Path) -> TextIO:
    """Locks a directory until the returned file is closed or this process exits.

    Without the lock, two servers would delete each other's unfinished checkpoints and resume from each
    other's steps.

    Raises:
        ConfigError: The directory cannot be written, or another process has locked it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / _FILE).open("a+")
    except OSError as error:
        raise unwritable(directory, error) from error
    try:
        _lock_file(file, directory)
        begin(directory).rmdir()  # fails now, not at the first checkpoint, if the directory is not writable
    except BaseException:
        file.close()
        raise
    return file


def _lock_file(file: TextIO, directory: Path) -> None:
    try:
        # Not flock: children inherit its lock and can hold it after this process exits.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.seek(0)
            raise ConfigError(
                f"{directory} is locked by {file.read().strip() or 'another process'}; wait until that"
                " process exits, or use another --checkpoint-dir"
            ) from error
        log.warning(
            "cannot lock %s (%s); make sure that no other server writes to it", directory, error.strerror
        )
    try:
        file.truncate(0)
        file.write(f"{socket.gethostname()} pid {os.getpid()}\n")
        file.flush()
    except OSError as error:
        raise unwritable(directory, error) from error

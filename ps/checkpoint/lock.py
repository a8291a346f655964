"""The lock on a folder of checkpoints: one process at a time writes there."""

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
    """Takes a directory for this process alone, until the file returned is closed or the process ends.

    Two that wrote there would each sweep away what the other is writing, and go on from the other's steps.

    Raises:
        ConfigError: The directory cannot be written, or another process has taken it; says which.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / _FILE).open("a+")
    except OSError as error:
        raise unwritable(directory, error) from error
    try:
        _lock_file(file, directory)
        begin(directory).rmdir()  # one that cannot be written is told now, not at the first checkpoint
    except BaseException:
        file.close()
        raise
    return file


def _lock_file(file: TextIO, directory: Path) -> None:
    try:
        # Of the process, where flock's would be its children's as well and outlive it with them.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.seek(0)
            raise ConfigError(
                f"{file.read().strip() or 'another process'} keeps its checkpoints in {directory}: wait for"
                " its end, or give another --checkpoint-dir"
            ) from error
        log.warning("%s cannot be locked (%s): let nobody else write there", directory, error.strerror)
    try:
        file.truncate(0)
        file.write(f"{socket.gethostname()} pid {os.getpid()}\n")
        file.flush()
    except OSError as error:
        raise unwritable(directory, error) from error

"""The errors that Horovod's users catch.

HorovodInternalError       an operation failed, on every rank
  RefusedCall              a call that Horovod's core refuses, not its Python code; also a ValueError
HostsUpdatedInterrupt      a worker joins: synchronize the state, then continue
ValueError                 the call is invalid; nothing was sent
ImportError
  HorovodVersionMismatchError    never raised, since nothing here is compiled for a version of torch
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hubring.ps.core.errors import HubringError, UsageError


class HorovodInternalError(RuntimeError):
    """An operation failed: ranks disagree about it, or a rank that it needs is lost."""


class RefusedCall(HorovodInternalError, ValueError):
    """An invalid call, such as a call before `init`. Horovod raises one of the two errors in such cases."""


class HorovodVersionMismatchError(ImportError):
    """Exists only for `except` clauses of scripts."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name, self.version, self.installed_version = name, version, installed_version


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Returns the text of a `HorovodVersionMismatchError`."""
    return f"{name} {installed_version} was expected, but {version} was found"


class HostsUpdatedInterrupt(RuntimeError):
    """The set of workers has changed, and no progress is lost.

    Attributes:
        skip_sync: Whether no rank needs the state of another.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of workers has changed")
        self.skip_sync = skip_sync


@contextmanager
def translated() -> Iterator[None]:
    """Translates Hubring's errors: UsageError to ValueError, any other to HorovodInternalError."""
    try:
        yield
    except UsageError as error:
        raise ValueError(str(error)) from error
    except HubringError as error:
        raise HorovodInternalError(str(error)) from error

"""Errors by the names that Horovod's users catch.

HorovodInternalError       an operation that had begun failed, on every rank
  Refused                  what Horovod's core, and not its Python part, refuses: also a ValueError
HostsUpdatedInterrupt      workers came: synchronise, then go on
ValueError                 the call itself cannot mean anything; nothing was sent
ImportError
  HorovodVersionMismatchError    never raised: nothing here was compiled for a version of torch
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hubring.ps.core.errors import HubringError, UsageError


class HorovodInternalError(RuntimeError):
    """An operation failed: ranks disagreed on it, or somebody whom it needs is gone."""


class Refused(HorovodInternalError, ValueError):
    """A call that cannot be made: before `init`, for which Horovod raises now the one, now the other."""


class HorovodVersionMismatchError(ImportError):
    """What scripts may name in an `except`."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name, self.version, self.installed_version = name, version, installed_version


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """The text of a `HorovodVersionMismatchError`."""
    return f"{name} {installed_version} was expected, but {version} was found"


class HostsUpdatedInterrupt(RuntimeError):
    """The set of workers has changed in a way that undoes nothing.

    Attributes:
        skip_sync: No state needs to be brought to anybody.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of workers has changed")
        self.skip_sync = skip_sync


@contextmanager
def translated() -> Iterator[None]:
    """Turns our errors into Horovod's: a call without meaning is a ValueError, any other internal."""
    try:
        yield
    except UsageError as error:
        raise ValueError(str(error)) from error
    except HubringError as error:
        raise HorovodInternalError(str(error)) from error

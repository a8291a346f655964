"""Errors by the names that Horovod's users catch.

HorovodInternalError       an operation that had begun failed, on every rank
HostsUpdatedInterrupt      workers came: synchronise, then go on
ValueError                 the call itself cannot mean anything; nothing was sent
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ps.errors import HubringError, UsageError


class HorovodInternalError(RuntimeError):
    """An operation failed: ranks disagreed on it, or somebody whom it needs is gone."""


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

"""Restores a primary's stream after its connection broke.

Law: only the coordinator gives up a standby. Until it does, the primary dials again. Once it has not reached
the standby for UNREACHABLE_SECONDS, it asks the coordinator to give it up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from enum import Enum, auto
from math import inf

from hubring.ps.core.errors import ConnectionLost, ServerUnreachable
from hubring.ps.standby.stream import StandbyLost
from hubring.ps.transport.base import Connection

log = logging.getLogger(__name__)

UNREACHABLE_SECONDS = 2.0
"""Longer than a restarted network needs, shorter than the workers' patience (`REDIAL_SECONDS`)."""
_PAUSE = 0.05


class Verdict(Enum):
    """The coordinator's word on a stream."""

    WAIT = auto()
    ALONE = auto()
    """The standby is given up: the primary goes on without one."""
    STOP = auto()
    """The primary is not needed any more."""


def restore(
    lost: ConnectionLost,
    dial: Callable[[], Connection],
    ask: Callable[[bool], Verdict],
    attach: Callable[[Connection], object],
    leave: Callable[[], object],
) -> threading.Thread:
    """Starts a thread that connects again, or learns that there is no standby any more.

    Args:
        lost: Why the connection broke.
        dial: Connects to the standby; raises ServerUnreachable.
        ask: Asks the coordinator; the argument is whether the standby cannot be reached.
        attach: Takes the new connection.
        leave: Called if the standby is given up.
    """
    thread = threading.Thread(
        target=_restore, args=(lost, dial, ask, attach, leave), name="standby", daemon=True
    )
    thread.start()
    return thread


def _restore(
    lost: ConnectionLost,
    dial: Callable[[], Connection],
    ask: Callable[[bool], Verdict],
    attach: Callable[[Connection], object],
    leave: Callable[[], object],
) -> None:
    log.debug("the connection to the standby broke (%s); connecting again", lost)
    began = -inf if isinstance(lost, StandbyLost) else time.monotonic()
    while True:
        unreachable = time.monotonic() - began > UNREACHABLE_SECONDS
        if not unreachable:
            try:
                attach(dial())
                return
            except ServerUnreachable as error:
                log.debug("the standby is not reached: %s", error)
        verdict = ask(unreachable)
        if verdict is Verdict.ALONE:
            leave()
        if verdict is not Verdict.WAIT:
            return
        time.sleep(_PAUSE)

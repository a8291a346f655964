"""`elastic.run`: continues training when workers leave or join."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from hubring.workers.horovod.elastic import membership
from hubring.workers.horovod.elastic.state import State
from hubring.workers.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt, Refused

log = logging.getLogger(__name__)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a training function whose first argument is a `State`.

    After every change of the workers the function is called again: with the last commit if a worker is lost,
    with the current state if a worker joins. Anything outside the state must not depend on the number of
    calls.

    Raises:
        HorovodInternalError: The job cannot continue: the server is lost, or the topology is a ring.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        members = membership.of_process()
        members.enter()
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                result = func(state, *args, **kwargs)
                members.leave()
                return result
            except Refused:
                raise  # the next call would fail in the same way
            except HorovodInternalError as error:
                log.warning("elastic: returning to the last commit: %s", error)
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as news:
                skip_sync = news.skip_sync
            members.adopt()
            state.on_reset()

    return wrapper

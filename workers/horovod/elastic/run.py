"""`elastic.run`: training that begins again where it was committed when workers come or go."""

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
    """Wraps a training function, whose first argument is a `State`.

    The function is called anew after every change: from the last commit if
    somebody is gone, from where it was if somebody has come. Whatever its state
    does not hold must not depend on how often it was called.

    Raises:
        HorovodInternalError: The job cannot go on: its server is gone, or it is a ring.
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
                raise  # it would be refused again
            except HorovodInternalError as error:
                log.warning("elastic: back to the last commit: %s", error)
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as news:
                skip_sync = news.skip_sync
            members.adopt()
            state.on_reset()

    return wrapper

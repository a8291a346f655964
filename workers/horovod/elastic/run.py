"""`elastic.run`: continues training when workers leave or join."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from hubring.workers.horovod.elastic import membership
from hubring.workers.horovod.elastic.notification import notification_manager
from hubring.workers.horovod.elastic.object_state import State
from hubring.workers.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt, Refused
from hubring.workers.horovod.world.world import current

log = logging.getLogger(__name__)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a training function whose first argument is a `State`.

    After every change of the workers the function is called again: with the last commit if a worker is lost,
    with the current state if a worker joins. Anything outside the state must not depend on the number of
    calls.

    Raises:
        HorovodInternalError: The job cannot continue: the server is lost, or the topology is a ring without
            `--min-workers`.
    """
    return run_fn(func, _nothing)


def run_fn(func: Callable[..., Any], reset: Callable[[], Any]) -> Callable[..., Any]:
    """Wraps a training function as `run` does.

    Args:
        func: The training function.
        reset: Called after every change of the workers, before the state's `on_reset`. It can call
            `hvd.shutdown()` and `hvd.init()`, as in Horovod, but need not: the ranks change anyway.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        members = membership.of_process()
        members.enter()
        skip_sync = False
        notification_manager.register_listener(state)
        try:
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
                _reset(members, reset)
                state.on_reset()
        finally:
            notification_manager.remove_listener(state)

    return wrapper


def _reset(members: membership.Members, reset: Callable[[], Any]) -> None:
    before = current().generation
    reset()
    if current().generation == before:  # otherwise init() has done it
        members.adopt()


def _nothing() -> None:
    """Resets nothing beside the ranks."""

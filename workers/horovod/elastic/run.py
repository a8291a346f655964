"""State that survives changes of the workers, and `elastic.run`, which continues training with it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from hubring.workers.horovod.elastic import membership
from hubring.workers.horovod.elastic.notification import notification_manager
from hubring.workers.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt, RefusedCall
from hubring.workers.horovod.functions import broadcast_object
from hubring.workers.horovod.world import current

Broadcast = Callable[[Any], Any]


def _from_root(value: Any) -> Any:
    return broadcast_object(value, membership.root(), "elastic.state")


class State:
    """The interface: saves state in this process, restores it, and synchronizes it between ranks.

    Args:
        bcast_object: Broadcasts an object; None, or `hvd.broadcast_object`: from a rank that is no newcomer.
        get_rank: Accepted as in Horovod; not used.
    """

    def __init__(
        self, bcast_object: Broadcast | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        self._broadcast = _from_root if bcast_object in (None, broadcast_object) else bcast_object
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._updates: SimpleQueue[int] = SimpleQueue()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Adds functions to call when the workers change, for example to scale the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """`elastic.run` calls this once the new ranks are known, before `sync`."""
        self._new_updates()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Makes the next `check_host_updates` raise HostsUpdatedInterrupt on all ranks, if called on rank 0.

        Args:
            timestamp: Accepted, but has no effect.
            update_res: A value of `HostUpdateResult`. If it is `removed`, no rank needs the state of another.
        """
        self._updates.put(update_res)

    def commit(self) -> None:
        """Saves the state, then checks for changes of the workers; raises as `check_host_updates`."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Checks for changes of the workers. Every rank must call this at the same point.

        Raises:
            HorovodInternalError: A worker is lost; `elastic.run` returns to the last commit.
            HostsUpdatedInterrupt: A worker joins, or `on_hosts_updated` was called; and no worker is lost.
        """
        membership.check(self._new_updates())

    def _new_updates(self) -> int:
        """Returns the bits of all updates that were not returned before."""
        update = 0
        while not self._updates.empty():
            update |= self._updates.get()
        return update

    def save(self) -> None:
        """Saves the state in this process's memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restores the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copies the state from a rank that is not a newcomer to all ranks."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapts the state to the new ranks; does nothing by default."""


class ObjectState(State):
    """State of any picklable values, which become attributes.

    Args:
        bcast_object: See `State`.
        get_rank: See `State`.
        values: The values by name.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(
        self,
        bcast_object: Broadcast | None = None,
        get_rank: Callable[[], int] | None = None,
        **values: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved = values
        self._assign_saved()

    def save(self) -> None:
        self._saved = {name: getattr(self, name) for name in self._saved}

    def restore(self) -> None:
        self._assign_saved()

    def sync(self) -> None:
        if self._saved:
            self.save()
            self._saved = self._broadcast(self._saved)
            self._assign_saved()

    def _assign_saved(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, value)


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
    return run_fn(func, lambda: None)


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
                except RefusedCall:
                    raise  # the next call would fail in the same way
                except HorovodInternalError as error:
                    log.warning("elastic: returning to the last commit: %s", error)
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as news:
                    skip_sync = news.skip_sync
                before = current().generation
                reset()
                if current().generation == before:  # otherwise init() has done it
                    members.adopt()
                state.on_reset()
        finally:
            notification_manager.remove_listener(state)

    return wrapper

"""What training must not lose when workers come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hubring.workers.horovod.collectives.objects import broadcast_object
from hubring.workers.horovod.elastic import membership

Bring = Callable[[Any], Any]


def _from_root(value: Any) -> Any:
    return broadcast_object(value, membership.root(), "elastic.state")


class State:
    """The interface: what is saved in this process, put back, and brought to all.

    Args:
        bcast_object: Brings an object to all; None, or `hvd.broadcast_object`: from whoever was there before.
        get_rank: Accepted as in Horovod, and not needed.
    """

    def __init__(self, bcast_object: Bring | None = None, get_rank: Callable[[], int] | None = None) -> None:
        self._bring = _from_root if bcast_object in (None, broadcast_object) else bcast_object
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Adds what is called whenever the set of workers has changed: to scale the learning rate, say."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called by `elastic.run` once the new ranks are known, and before `sync`."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Saves, then asks whether the workers are still the same; raises as `check_host_updates`."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Asks, together with all workers, whether they are still the same; every rank must call it.

        Raises:
            HorovodInternalError: Somebody is gone; `elastic.run` goes back to the last commit.
            HostsUpdatedInterrupt: Somebody has come, and nobody is gone.
        """
        membership.check()

    def save(self) -> None:
        """Keeps what there is, in this process's memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Puts back what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives every rank what the rank has that was there before."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepares for other ranks; nothing, unless a class says otherwise."""


class ObjectState(State):
    """Any picklable values, which are this object's attributes.

    Args:
        bcast_object: As of `State`.
        get_rank: Likewise.
        values: By name.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(
        self,
        bcast_object: Bring | None = None,
        get_rank: Callable[[], int] | None = None,
        **values: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved = values
        self._put_back()

    def save(self) -> None:
        self._saved = {name: getattr(self, name) for name in self._saved}

    def restore(self) -> None:
        self._put_back()

    def sync(self) -> None:
        if self._saved:
            self.save()
            self._saved = self._bring(self._saved)
            self._put_back()

    def _put_back(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, value)

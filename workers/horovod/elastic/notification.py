"""Tells listeners that workers have left or join, under Horovod's names."""

from __future__ import annotations

from typing import Any, Protocol


class HostUpdateResult:
    """How the workers change; `mixed` has the bits of both others."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added

    @classmethod
    def of(cls, removed: object, added: object) -> int:
        """Returns the bits for whether workers were removed and whether some were added."""
        return cls.removed * bool(removed) | cls.added * bool(added)


class Listener(Protocol):
    """An elastic state, or an object of the script."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> Any:
        """Called once for each change of the workers that this worker learns of.

        Args:
            timestamp: Seconds since the epoch.
            update_res: A value of `HostUpdateResult`.
        """


class WorkerNotificationManager:
    """The listeners of this process. Every elastic state listens while its training function runs.

    Listeners are called after a call of the training function has ended because the workers change, when the
    new ranks are known. No thread calls them at another time.
    """

    def __init__(self) -> None:
        self._listeners: dict[int, Listener] = {}

    def init(self, *arguments: Any, **named: Any) -> None:
        """Accepted, but has no effect: no service has to start."""

    def register_listener(self, listener: Listener) -> None:
        """Adds a listener; a second call with the same object has no effect."""
        self._listeners[id(listener)] = listener

    def remove_listener(self, listener: Listener) -> None:
        """Removes a listener."""
        self._listeners.pop(id(listener), None)

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Calls all listeners."""
        for listener in list(self._listeners.values()):
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()

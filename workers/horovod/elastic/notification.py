"""How workers learn which workers join or leave: notes on the hub's board, and Horovod's listeners.

    newcomer   waiting.RANK = LIFE    a newcomer with the id LIFE waits for RANK
    lowest     admit.LIFE = members   the newcomer is admitted; these are the members
    newcomer   entered.LIFE           the hub counts the newcomer; rounds can wait for it
    lowest     training = over        no worker can join

A newcomer enters only after the members admit it and wait for it. Otherwise rounds would wait for a
worker that does not know of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from hubring.ps.client.session import Session
from hubring.ps.core.errors import ConfigError, DeadlineExceeded
from hubring.ps.core.types import Slicing
from hubring.ps.job.sharding import SLICE_BYTES

ENTER_SECONDS = 60.0
"""How long the members wait for an admitted newcomer."""

LOOK_SECONDS = 2.0
UNDER_WAY, OVER = "under way", "over"

Lives = dict[int, int]
"""Rank in the job to the id of the worker. A restarted worker has a new id."""


class NewcomerBoard:
    """One worker's view of the board.

    Args:
        session: The worker's session with the hub.
        timeout: Seconds that a newcomer waits for admission.
    """

    def __init__(self, session: Session, timeout: float) -> None:
        self._session = session
        self._timeout = timeout

    def count(self) -> None:
        """Makes the hub count this worker. For a late worker this needs the job's plan; here it is empty."""
        self._session.plan((), Slicing(SLICE_BYTES))

    def tell(self, training: str) -> None:
        """Publishes whether training is under way or over."""
        self._session.board.publish("horovod.training", training)

    def newcomer(self, ranks: Iterable[int], known: Iterable[int]) -> tuple[int, int] | None:
        """Returns the rank and id of a waiting newcomer; None without one.

        Args:
            ranks: The free ranks.
            known: The ids of workers that were admitted before.
        """
        for rank in ranks:
            with suppress(DeadlineExceeded):
                life = int(self._session.board.lookup(f"horovod.waiting.{rank}", 0.001))
                if life not in known:
                    return rank, life
        return None

    def admit(self, life: int, members: Mapping[int, int], generation: int) -> None:
        """Admits a newcomer."""
        pairs = " ".join(f"{rank}:{one}" for rank, one in members.items())
        self._session.board.publish(f"horovod.admit.{life}", f"{generation} {pairs}")

    def await_entry(self, life: int) -> None:
        """Returns once the hub counts the newcomer.

        Raises:
            DeadlineExceeded: The newcomer did not enter in time.
        """
        self._session.board.lookup(f"horovod.entered.{life}", ENTER_SECONDS)

    def enter(self, rank: int, life: int) -> tuple[Lives, int]:
        """Waits for admission, enters, and returns the members and their generation.

        Raises:
            DeadlineExceeded: The members did not admit this worker in time.
            ConfigError: Training is over.
        """
        self._session.board.publish(f"horovod.waiting.{rank}", str(life))
        generation, *members = self._await_admission(life).split()
        self.count()
        self._session.board.publish(f"horovod.entered.{life}", "yes")
        pairs = (one.split(":") for one in members)
        return {int(member): int(one) for member, one in pairs}, int(generation)

    def _await_admission(self, life: int) -> str:
        deadline = time.monotonic() + self._timeout
        while (left := deadline - time.monotonic()) > 0:
            with suppress(DeadlineExceeded):
                return self._session.board.lookup(f"horovod.admit.{life}", min(left, LOOK_SECONDS))
            if self._session.board.lookup("horovod.training", self._timeout) == OVER:
                raise ConfigError("this worker cannot join: training is over")
        raise DeadlineExceeded(
            f"the other workers did not admit this worker within {self._timeout:g} s (--timeout);"
            " they must call commit() or check_host_updates()"
        )


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


class WorkerNotificationManager:
    """The listeners of this process. Every elastic state listens while its training function runs.

    A listener is an elastic state or an object of the script. Its method `on_hosts_updated(timestamp,
    update_res)` is called once for each change of the workers that this worker learns of, with the seconds
    since the epoch and a value of `HostUpdateResult`.

    Listeners are called after a call of the training function has ended because the workers change, when the
    new ranks are known. No thread calls them at another time.
    """

    def __init__(self) -> None:
        self._listeners: dict[int, Any] = {}

    def init(self, *arguments: Any, **named: Any) -> None:
        """Accepted, but has no effect: no service has to start."""

    def register_listener(self, listener: Any) -> None:
        """Adds a listener; a second call with the same object has no effect."""
        self._listeners[id(listener)] = listener

    def remove_listener(self, listener: Any) -> None:
        """Removes a listener."""
        self._listeners.pop(id(listener), None)

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Calls all listeners."""
        for listener in list(self._listeners.values()):
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()

"""What a session tells the threads that wait for data."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hubring.ps.client.session import Session
from hubring.ps.core.errors import HubringError, JobFailed


class Interrupted(list[Callable[[HubringError], None]]):
    """A list of callbacks to which one is added while the job fails."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self.failing = threading.Thread(target=session._fail, args=(JobFailed("a shard is lost"),))

    def append(self, callback: Callable[[HubringError], None]) -> None:
        super().append(callback)
        self.failing.start()
        if not self._session._failing.locked():
            self.failing.join()


def test_a_callback_that_is_added_while_the_job_fails_is_called_once() -> None:
    session = Session.__new__(Session)
    session.failure, session._explained = None, threading.Event()
    session._failing = threading.Lock()
    session._on_failure = callbacks = Interrupted(session)
    told: list[HubringError] = []
    session.on_failure(told.append)
    callbacks.failing.join()
    assert [str(error) for error in told] == ["a shard is lost"]

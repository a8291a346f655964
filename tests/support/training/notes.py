"""What the workers of a job publish for each other, without a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, unquote

from hubring.ps.client.rendezvous import Board
from hubring.ps.core.errors import DeadlineExceeded, HubringError


class SharedNotes(Board):
    """Notes of ranks that are threads of one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.awaited: list[str] = []
        """Every key that a rank waited for."""
        self._error: HubringError | None = None
        self._changed = threading.Condition()

    def publish(self, key: str, value: str) -> None:
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def look_around(self, key: str, timeout: float, generation: int = 0) -> Mapping[str, str]:
        with self._changed:
            self.awaited.append(key)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.values.get(key) or self._error is not None, timeout)
            if self._error is not None:
                raise self._error
            if not self.values.get(key):  # as the server, which takes an empty text for none
                raise DeadlineExceeded(f"no rank published {key!r}")
            return {key: self.values[key]}

    def forget(self, folder: str) -> None:
        with self._changed:
            for key in [each for each in self.values if each.startswith(f"{folder}/")]:
                del self.values[key]

    def fail(self, error: HubringError) -> None:
        """Ends every wait, as the server does if the job fails."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def await_wait(self, times: int, timeout: float) -> None:
        """Waits until ranks have waited this often."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.awaited) >= times, timeout)


class FileNotes(Board):
    """Notes of ranks that are processes.

    Args:
        folder: Where they are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def publish(self, key: str, value: str) -> None:
        place = self._folder / quote(key, safe="")
        draft = place.with_name(f"draft of {place.name}")
        draft.write_text(value)
        draft.rename(place)

    def look_around(self, key: str, timeout: float, generation: int = 0) -> Mapping[str, str]:
        place, deadline = self._folder / quote(key, safe=""), time.monotonic() + timeout
        while not place.exists():
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"no rank published {key!r}")
            time.sleep(0.01)
        return {key: place.read_text()}

    def forget(self, folder: str) -> None:
        for place in list(self._folder.iterdir()):
            if unquote(place.name).startswith(f"{folder}/"):
                place.unlink()

"""A key-value store in which the workers of a job exchange addresses and the like.

Law: what one rank stores is bounded in keys and bytes, and so is the sum of all ranks. A key counts for the
rank that wrote it last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hubring.ps.coordinator.notifier import Notifier
from hubring.ps.core.errors import UsageError

KEY_BYTES = 256
"""Maximum bytes of a key."""
VALUE_BYTES = 64 << 10
"""Maximum bytes of a value. The longest are lists of all ranks, about 10 bytes each."""
RANK_KEYS = 1024
"""Maximum number of keys that one rank stores. An elastic job adds two for each worker that joins late."""
RANK_BYTES = 4 << 20
"""Maximum bytes that one rank stores, in keys and values."""
TOTAL_BYTES = 32 << 20
"""Maximum bytes of all ranks together."""
FOLDER_BYTES = 1 << 20
"""Maximum bytes of a folder's keys in one reply."""


class Rendezvous:
    """Values by key, of one job.

    Args:
        notifier: Where workers wait for a value.
    """

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._values: dict[str, str] = {}
        self._writers: dict[str, int] = {}
        self._keys: Counter[int] = Counter()
        self._bytes: Counter[int] = Counter()

    async def pin(self, rank: int, key: str, value: str) -> None:
        """Stores a rank's value and wakes the workers that wait for it.

        Raises:
            UsageError: The key, the value or what the rank stores is too large.
        """
        self._check_sizes(key, value)
        self._check_room(rank, key, value)
        self._remove(key)
        self._values[key], self._writers[key] = value, rank
        self._keys[rank] += 1
        self._bytes[rank] += _size(key, value)
        await self._notifier.announce()

    async def find(self, key: str, seconds: float, ended: Callable[[], bool] = lambda: False) -> str:
        """Waits for a value and returns it; empty after `seconds` without one, or if the wait has `ended`."""
        await self._notifier.wait_for(lambda: key in self._values or ended(), seconds)
        return self._values.get(key, "")

    def folder(self, key: str) -> dict[str, str]:
        """Returns other values of the key's folder, by name; of a large folder only some.

        A member of a group reads a key of each other member, so it would otherwise need as many calls.
        """
        place = _folder_of(key)
        found: dict[str, str] = {}
        room = FOLDER_BYTES
        for other, value in self._values.items():
            if place and other != key and _folder_of(other) == place:
                room -= _size(other, value)
                if room < 0:
                    break
                found[other.removeprefix(place)] = value
        return found

    def forget(self, folder: str) -> None:
        """Removes all keys of a folder, and of the folders in it."""
        for key in [one for one in self._values if one.startswith(f"{folder}/")]:
            self._remove(key)

    def _remove(self, key: str) -> None:
        if (writer := self._writers.pop(key, None)) is not None:
            self._keys[writer] -= 1
            self._bytes[writer] -= _size(key, self._values.pop(key))

    def _check_sizes(self, key: str, value: str) -> None:
        for what, text, most in (("key", key, KEY_BYTES), ("value", value, VALUE_BYTES)):
            if (nbytes := len(text.encode())) > most:
                raise UsageError(f"a {what} of {nbytes} bytes is too large; publish at most {most} bytes")

    def _check_room(self, rank: int, key: str, value: str) -> None:
        writer = self._writers.get(key)
        replaced = _size(key, self._values[key]) if writer is not None else 0
        keys = self._keys[rank] + (writer != rank)
        if keys > RANK_KEYS:
            raise UsageError(f"rank {rank} published {RANK_KEYS} keys, the maximum; publish under fewer keys")
        own = self._bytes[rank] + _size(key, value) - replaced * (writer == rank)
        if own > RANK_BYTES:
            raise UsageError(
                f"rank {rank} would publish {own} bytes, but the maximum is {RANK_BYTES};"
                " publish shorter or fewer values"
            )
        total = self._bytes.total() + _size(key, value) - replaced
        if total > TOTAL_BYTES:
            raise UsageError(
                f"the workers would publish {total} bytes, but the maximum is {TOTAL_BYTES};"
                " publish shorter or fewer values"
            )


def _folder_of(key: str) -> str:
    """Returns a key's folder with its last slash; empty for a key without one."""
    return "".join(key.rpartition("/")[:2])


def _size(key: str, value: str) -> int:
    return len(key.encode()) + len(value.encode())

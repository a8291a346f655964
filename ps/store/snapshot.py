"""A shard's state in a checkpoint: every key at one moment."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from hubring.ps.store.key_state import Entry
    from hubring.ps.store.push_ledger import Ledger


@dataclass(slots=True)
class KeyState:
    """The state of one key that a restart restores.

    Attributes:
        values: Flat parameters.
        optimizer: The optimizer's tensors by name, as `OptimizerState.saved` returns them.
        version: How many updates the values include.
        clocks: Completed steps by rank.
    """

    values: Tensor
    optimizer: dict[str, Tensor]
    version: int
    clocks: dict[int, int] = field(default_factory=dict)


Snapshot = dict[int, KeyState]
"""States by key. Snapshots of several shards can be merged and distributed again."""


class Capture:
    """A snapshot in progress: copies every key once, when the key reaches `version` (None: at once)."""

    def __init__(self, version: int | None, keys: Collection[int]) -> None:
        self.caught: Snapshot = {}
        self._version = version
        self._missing = set(keys)

    @classmethod
    def begin(cls, version: int | None, entries: Collection[Entry], ledger: Ledger) -> Capture | None:
        """Begins a snapshot of these keys; returns None if some key has passed the version."""
        if version is not None and any(entry.version > version for entry in entries):
            return None
        capture = cls(version, [entry.key for entry in entries])
        for entry in entries:
            capture.catch(entry, ledger)
        return capture

    def catch(self, entry: Entry, ledger: Ledger) -> None:
        """Copies a key if it has values and has reached the version."""
        due = entry.key in self._missing and self._version in (None, entry.version)
        if due and entry.initialised:
            state = entry.export()
            state.clocks = ledger.saved(entry.key)
            self.caught[entry.key] = state
            self._missing.remove(entry.key)

    def expect(self, entries: Collection[Entry], ledger: Ledger) -> None:
        """Adds keys that join the store, unless every earlier key has been copied already."""
        if not self.complete:
            self._missing.update(entry.key for entry in entries)
            for entry in entries:
                self.catch(entry, ledger)

    @property
    def complete(self) -> bool:
        return not self._missing

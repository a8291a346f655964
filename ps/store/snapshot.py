"""A shard's state at one moment per key, as checkpoints hold it."""

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
    """Everything about one key that a restart must bring back.

    Attributes:
        values: Flat parameters.
        optimizer: The optimizer's tensors by name; flat, or of one element.
        version: Updates that these hold.
        clocks: By rank, the steps that it had completed.
    """

    values: Tensor
    optimizer: dict[str, Tensor]
    version: int
    clocks: dict[int, int] = field(default_factory=dict)


Snapshot = dict[int, KeyState]
"""By key; those of several shards can be merged and dealt out anew."""


class Capture:
    """A snapshot in the making: every key is caught once, as it reaches `version` (None: as it is)."""

    def __init__(self, version: int | None, keys: Collection[int]) -> None:
        self.caught: Snapshot = {}
        self._version = version
        self._missing = set(keys)

    def catch(self, entry: Entry, ledger: Ledger) -> None:
        """Copies a key, if this is the moment."""
        due = entry.key in self._missing and self._version in (None, entry.version)
        if due and entry.initialised:
            state = entry.export()
            state.clocks = dict(ledger.clocks(entry.key))
            self.caught[entry.key] = state
            self._missing.remove(entry.key)

    @property
    def complete(self) -> bool:
        return not self._missing

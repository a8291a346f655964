"""The keys of one shard, in one allocation, and a copy of them at one moment for a checkpoint."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from math import ceil

import torch
from torch import Tensor

from hubring.ps.core.errors import CheckpointCorrupt
from hubring.ps.core.types import DTYPE_BYTES, BucketSpec, Sender, Slice
from hubring.ps.job.sharding import PAGE_BYTES
from hubring.ps.store.key_state import KeyEntry, Snapshot
from hubring.ps.store.parameter_memory import ParameterMemory


class KeyTable(dict[int, KeyEntry]):
    """Entries by key, and the scratch memory for their rounds.

    Attributes:
        scratch: By the dtype in which gradients are summed; each twice as long as the longest such key.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scratch: dict[torch.dtype, Tensor] = {}

    @classmethod
    def make(
        cls,
        slices: Sequence[Slice],
        buckets: Mapping[int, BucketSpec],
        memory: ParameterMemory,
        *,
        finite: bool,
        shown: bool,
        extends: bool = False,
    ) -> KeyTable:
        """Creates a key for each slice. All values share one allocation, and each key begins at a page.

        Args:
            slices: This shard's slices.
            buckets: The buckets of the slices, by index.
            memory: Where values and scratch are allocated.
            finite: Whether to refuse gradients that are not finite.
            shown: Whether workers may exchange gradients and values as locations in GPU memory.
            extends: Whether the memory of earlier tables stays in use.

        Raises:
            ConfigError: The hub does not support a bucket's dtype or optimizer.
        """
        table = cls()
        sizes = [piece.numel * DTYPE_BYTES[buckets[piece.bucket].dtype] for piece in slices]
        pages = [ceil(nbytes / PAGE_BYTES) for nbytes in sizes]
        *starts, total = accumulate(pages, initial=0)
        whole = memory.allocate(total * PAGE_BYTES, extends=extends)
        gc.disable()  # it would walk through all keys again and again: 65,536 took 5.7 s instead of 1.2
        try:
            for piece, start in zip(slices, starts, strict=True):
                memory_of_key = whole[start * PAGE_BYTES :]
                entry = KeyEntry.make(piece, buckets[piece.bucket], memory_of_key, finite=finite)
                entry.shown = shown
                table[piece.key] = entry
        finally:
            gc.enable()
        longest: dict[torch.dtype, int] = {}
        for entry in table.values():
            dtype = entry.optimizer.dtype
            longest[dtype] = max(entry.values.numel(), longest.get(dtype, 0))
        table.scratch = {
            dtype: torch.empty(2 * numel, dtype=dtype, device=memory.device)
            for dtype, numel in longest.items()
        }
        return table

    def reach(self, version: int) -> None:
        """Brings every key to a version, unless it is further."""
        for entry in self.values():
            entry.version = max(entry.version, version)

    def start_clocks(
        self, joined: Iterable[Sender], *, lockstep: bool, late: bool = False, first: int | None = None
    ) -> None:
        """Starts senders at the open round of each key, or without rounds at their rank's clock.

        A rank without a clock starts at `first` (None: the slowest clock). `late` senders join workers that
        stay.
        """
        for entry in self.values():
            start = min(entry.clocks.values(), default=0) if first is None else first
            for rank, _ in joined:
                entry.clocks[rank] = entry.version if lockstep else entry.clocks.get(rank, start)
                entry.read[rank] = entry.version
                if late:
                    entry.late.add(rank)

    def admit(
        self, joined: Sequence[Sender], live: Mapping[int, int], *, lockstep: bool, first: int | None = None
    ) -> None:
        """Starts joiners at the open round, or without rounds at the slowest live worker's clock.

        If no earlier worker is live, as after a restore, each continues the clocks of its rank instead.
        """
        stayed = live.keys() - {sender.rank for sender in joined}
        for entry in self.values() if stayed else ():
            entry.retain(stayed)
        self.start_clocks(joined, lockstep=lockstep, late=bool(stayed), first=first)
        for entry in self.values() if live else ():
            entry.retain(live.keys())

    def extend(self, more: KeyTable) -> None:
        """Adds the keys of another table."""
        self.update(more)
        for dtype, scratch in more.scratch.items():
            if dtype not in self.scratch or self.scratch[dtype].numel() < scratch.numel():
                self.scratch[dtype] = scratch

    def restore(self, snapshot: Snapshot, version: int | None = None) -> None:
        """Restores every key from a checkpoint; with `version`, starts every key at it.

        Raises:
            CheckpointCorrupt: A key is missing, or has another size.
        """
        for key, entry in self.items():
            if key not in snapshot:
                raise CheckpointCorrupt(f"the checkpoint has no key {key}; another job wrote this checkpoint")
            entry.restore(snapshot[key])
            entry.version = entry.version if version is None else version


class Capture:
    """A snapshot in progress: copies every key once, when the key reaches `version` (None: at once)."""

    def __init__(self, version: int | None, keys: Collection[int]) -> None:
        self.caught: Snapshot = {}
        self._version = version
        self._missing = set(keys)

    @classmethod
    def begin(cls, version: int | None, entries: Collection[KeyEntry]) -> Capture | None:
        """Begins a snapshot of these keys; None if some key has passed the version, or key 0 has it."""
        # The answers of key 0 to this version ask for the workers' states, so none may be sent yet.
        if version is not None and any(entry.version + (entry.key == 0) > version for entry in entries):
            return None
        capture = cls(version, [entry.key for entry in entries])
        for entry in entries:
            entry.saved_at = -1 if version is None else version
            capture.catch(entry)
        return capture

    def catch(self, entry: KeyEntry) -> None:
        """Copies a key if it has values and has reached the version."""
        due = entry.key in self._missing and self._version in (None, entry.version)
        if due and entry.initialised:
            self.caught[entry.key] = entry.export()
            self._missing.remove(entry.key)

    def expect(self, entries: Collection[KeyEntry]) -> None:
        """Adds keys that join the store, unless every earlier key has been copied already."""
        if not self.complete:
            self._missing.update(entry.key for entry in entries)
            for entry in entries:
                self.catch(entry)

    @property
    def complete(self) -> bool:
        return not self._missing

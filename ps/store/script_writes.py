"""When a script's write to a key counts.

In lockstep modes a write waits for the round of its sender's next push. In the other modes it is applied at
once; parameters only if no other worker is live, because others may be about to push gradients of the old
ones. A write for a step that is over changes nothing: it is a late retry, or its round closed without its
sender.
"""

from __future__ import annotations

from hubring.ps.core.messages import Refusal, Result, Write, WriteParameters
from hubring.ps.store import refusals
from hubring.ps.store.consistency import Consistency
from hubring.ps.store.key_state import Entry


def take(entry: Entry, write: Write, expected: int, consistency: Consistency, live: int) -> Result | Refusal:
    """Keeps or applies a write that fits the key; returns the reply.

    Args:
        entry: The key.
        write: From a live worker.
        expected: The clock of the sender's next push.
        consistency: The mode's rule.
        live: The number of live workers.
    """
    if write.clock > expected:
        return refusals.out_of_order(write, expected)
    if not consistency.lockstep and live > 1 and isinstance(write, WriteParameters):
        return refusals.crowded(entry, write.sender, live)
    due = entry.version if consistency.lockstep else expected
    if write.clock == due and entry.writes.is_newest(write):
        entry.writes.put(write)
        if not consistency.lockstep:
            entry.apply_writes([write.sender.rank])
    return Result()

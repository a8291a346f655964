"""Which of a key's waiting workers may read now, and the replies to them."""

from __future__ import annotations

from hubring.ps.core.messages import Delivery, Values
from hubring.ps.store.consistency import Consistency
from hubring.ps.store.key_state import Entry, Reader
from hubring.ps.store.parameter_memory import ParameterMemory
from hubring.ps.store.push_ledger import Ledger


class Reading:
    """The reads of one store.

    Args:
        consistency: Which workers may read.
        ledger: The clocks of the workers.
        memory: Holds the values.
    """

    def __init__(self, consistency: Consistency, ledger: Ledger, memory: ParameterMemory) -> None:
        self._consistency = consistency
        self._ledger = ledger
        self._memory = memory

    def answer(self, entry: Entry) -> list[Delivery]:
        """Answers all readers that the policy allows to read."""
        if not entry.readers:
            return []
        clocks = self._ledger.clocks(entry.key)
        everyone = clocks.values()
        ready = [rank for rank in entry.readers if self._consistency.may_read(clocks[rank], everyone)]
        return [delivery for rank in ready for delivery in self.reply(entry, entry.readers.pop(rank))]

    def reply(self, entry: Entry, reader: Reader) -> list[Delivery]:
        """Answers all tries of one reader with the values as they are."""
        rank, clock = reader.sender.rank, reader.clock
        contributes = rank in entry.contributions
        if self._consistency.lockstep and not contributes:
            # Rounds may have closed without this worker, so it continues with the open round.
            self._ledger.advance(reader.sender, entry.key, entry.version)
        if self._consistency.lockstep or clock is None:
            clock = self._ledger.expected(reader.sender, entry.key)
        entry.read[rank] = entry.version
        values = Values(
            key=entry.key,
            values=entry.answer_for(reader, self._memory),
            clock=clock,
            version=entry.version,
            staleness=reader.staleness,
            drain=entry.version >= entry.drain_from,
            # The next update needs a gradient from every live worker, and this worker has not sent
            # its gradient yet. Until it does, the values do not change. A worker that is removed
            # meanwhile may see later bytes, but it is fenced, so its results do not count. With
            # backup workers, or in asynchronous modes, other workers can update without it.
            stable=self._consistency.stable and not contributes,
            absent=reader.absent,
        )
        return [Delivery(ticket, values) for ticket in reader.tickets]

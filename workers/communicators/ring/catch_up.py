"""Gives members of a new generation what they lack of the generation before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hubring.workers.communicators.ring import collectives
from hubring.workers.communicators.ring.call_log import Result, Results, results_of
from hubring.workers.communicators.ring.communicator import AllreduceCommunicator
from hubring.workers.communicators.ring.exchange_log import ExchangeLog
from hubring.workers.communicators.ring.meeting import Agreed
from hubring.workers.communicators.ring.process_group import Ring

TakeOver = Callable[[Sequence[Result]], None]
"""Ends this member's calls with results."""


def catch_up(
    agreed: Agreed,
    ring: AllreduceCommunicator,
    exchanges: ExchangeLog,
    results: Results,
    take_over: TakeOver,
) -> None:
    """Brings all members to the position of the one that is ahead. Every member calls it.

    Raises:
        RingBroken: A member is lost. What this member has got stays valid.
    """
    old = agreed.old_notes
    done, performed = max(note.exchanges for note in old), max(note.collectives for note in old)
    lacks_means = any(note.exchanges < done for note in old)
    lacks_results = any(note.collectives < performed for note in old)
    if lacks_means:
        _give_means(agreed, ring.ring, exchanges, done)
    if lacks_results:
        _give_results(agreed, ring.ring, results, performed, take_over)
    if lacks_means or lacks_results:  # no member goes on before all have what they lacked
        ring.ring.gather("catching up", torch.zeros(1, dtype=torch.uint8, device=ring.ring.device))


def _give_means(agreed: Agreed, ring: Ring, exchanges: ExchangeLog, done: int) -> None:
    """Gives the means of exchange `done` to the members that lack them."""
    source = next(rank for rank, note in enumerate(agreed.old_notes) if note.exchanges == done)
    here = exchanges.latest if exchanges.latest.number == done else exchanges.in_flight
    assert here is not None
    for sent in here.sent:
        collectives.broadcast_into(ring, sent.wire, source, "the means of a complete exchange")
    for sent in here.sent:
        sent.arrived = True
    here.closed = True


def _give_results(agreed: Agreed, ring: Ring, results: Results, performed: int, take_over: TakeOver) -> None:
    """Gives results of collectives to the members that lack them."""
    counts = [note.collectives for note in agreed.old_notes]
    source = counts.index(performed)
    own = results.after(min(counts)) if ring.rank == source else torch.empty(0, dtype=torch.uint8)
    given = ring.gather("results of collectives", own.to(ring.device))[source]
    if ring.rank < len(counts) and counts[ring.rank] < performed:
        missing = [one for one in results_of(given) if one.number > counts[ring.rank]]
        results.extend(missing)
        take_over(missing)

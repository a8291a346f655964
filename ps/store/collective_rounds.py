"""Collectives on the hub: one part from every live member, one reply to each.

Law: a round is identified by group and name, and per name by the order of each
rank's calls. A round closes when all live members have sent a part, in any order.
It is computed in rank order, so a rerun is bitwise equal. A rank that called join()
no longer blocks rounds: until all ranks have called join(), it contributes zeros to
reductions, and any other round but a barrier is refused. Either every member gets its
result, or every member gets the same refusal. A reply is stored until its receiver
confirms it, so that a retry gets the same reply.

Law: the first results are kept, so that a worker that replaces a lost one before the first step gets what the
lost one got, or would have got. They are dropped once they need too much memory, or the job goes on without a
rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from hubring.ps.core.messages import (
    Code,
    Collective,
    CollectiveResult,
    Contribute,
    Delivery,
    Refusal,
    Reply,
    Ticket,
)
from hubring.ps.core.types import Sender
from hubring.ps.store.collective import Part, outcome

Live = Mapping[int, int]
"""The live workers: incarnation by rank."""

Key = tuple[tuple[int, ...], str]
"""Identifies a sequence of rounds: the members (empty for all), and the name."""

KEPT_BYTES = 64 << 20
"""The most that kept results may need."""
ROUND_BYTES = 16 << 10
"""What a kept round counts besides its tensors, so that their number has a bound."""


@dataclass(slots=True)
class _Waiting:
    request: Contribute
    tickets: list[Ticket]
    """One for each try of the call."""

    def answer(self, reply: Reply) -> list[Delivery]:
        return [Delivery(ticket, reply) for ticket in self.tickets]


class _Sent:
    """One sender's unconfirmed replies by sequence. It has confirmed all replies up to `settled`."""

    def __init__(self) -> None:
        self.replies: dict[int, Reply] = {}
        self.settled = 0

    def confirm(self, settled: int, closed: Iterable[int]) -> None:
        """Drops the replies that the sender has received."""
        if settled > self.settled:
            self.settled = settled
            self.replies = {number: reply for number, reply in self.replies.items() if number > settled}
        for number in closed:
            self.replies.pop(number, None)


class RoundBook:
    """All open rounds, and the replies that a retry may request again.

    Attributes:
        closed: How many rounds have closed.
    """

    def __init__(self) -> None:
        self.closed = 0
        self._open: dict[Key, dict[int, list[_Waiting]]] = {}
        """Parts by rank, each rank's in the order of its calls."""
        self._joined: dict[int, list[_Waiting]] = {}
        """The same for join(), in the order in which the ranks joined."""
        self._sent: dict[Sender, _Sent] = {}
        self.kept: dict[Key, list[dict[int, Reply]]] | None = {}
        """The replies by rank of the rounds that closed, in their order; None once they are dropped."""
        self._room = KEPT_BYTES
        self._begun: Counter[tuple[Sender, Key]] = Counter()
        """How many rounds of a key a sender has begun, while results are kept."""
        self._ranks: set[int] = set()

    @property
    def repeatable(self) -> int:
        """In how many closed rounds a worker in a lost one's place can still take part."""
        return 0 if self.kept is None else self.closed

    def drop_results(self) -> None:
        """Drops the kept results."""
        self.kept = None
        self._begun.clear()

    def contribute(self, request: Contribute, ticket: Ticket, live: Live) -> list[Delivery]:
        """Adds a live sender's part, or a retry of it; returns the replies of all rounds that it closes."""
        sent = self._sent.setdefault(request.sender, _Sent())
        sent.confirm(request.settled, request.closed)
        if request.sequence in sent.replies:
            return [Delivery(ticket, sent.replies[request.sequence])]
        refusal = _refusal(request, sent.settled)
        if refusal is not None:
            return [Delivery(ticket, refusal)]
        joins = request.call.collective is Collective.JOIN
        queues = self._joined if joins else self._open.setdefault(_key(request), {})
        queue = queues.setdefault(request.sender.rank, [])
        for waiting in queue:
            if waiting.request.sequence == request.sequence:
                # The first try's memory may be freed with its connection, so use the latest try's.
                waiting.request = request
                waiting.tickets.append(ticket)
                return []
        if queue and queue[-1].request.sequence > request.sequence:
            return [Delivery(ticket, _late(request, queue[-1].request))]
        waiting = _Waiting(request, [ticket])
        if joins:
            self.drop_results()
            queue.append(waiting)
            return self._close_all(live)
        key = _key(request)
        if self.kept is not None:
            number = self._begun[request.sender, key]
            self._begun[request.sender, key] += 1
            for replies in self.kept.get(key, [])[number : number + 1]:
                return self._settle(waiting, replies[request.sender.rank])
        queue.append(waiting)
        return self._close(key, live)

    def on_view(self, live: Live) -> list[Delivery]:
        """Removes workers that are no longer live, and closes the rounds that waited only for them."""
        if self._ranks - live.keys():
            self.drop_results()
        self._ranks = set(live)
        self._sent = {
            sender: sent for sender, sent in self._sent.items() if live.get(sender.rank) == sender.incarnation
        }
        deliveries = []
        for queues in (*self._open.values(), self._joined):
            for rank, queue in list(queues.items()):
                if queue and live.get(rank) != queue[0].request.sender.incarnation:
                    del queues[rank]
                    deliveries += [answer for one in queue for answer in one.answer(_fenced(one.request))]
        return deliveries + self._close_all(live)

    def refuse_all(self, refusal: Refusal) -> list[Delivery]:
        """Refuses every part of the open rounds."""
        waiting = self._waiting()
        self._open.clear()
        self._joined.clear()
        return [answer for one in waiting for answer in one.answer(refusal)]

    def open_parts(self) -> list[Contribute]:
        """Returns the parts of the open rounds, each rank's in the order of its calls."""
        return [one.request for one in self._waiting()]

    def unconfirmed(self) -> dict[Sender, tuple[int, dict[int, Reply]]]:
        """Returns by sender up to which call it has confirmed all replies, and the later replies by call."""
        return {sender: (sent.settled, dict(sent.replies)) for sender, sent in self._sent.items()}

    def restore(self, sender: Sender, settled: int, replies: Mapping[int, Reply]) -> None:
        """Restores what `unconfirmed` returned for a sender, without the kept results."""
        self.drop_results()
        sent = self._sent.setdefault(sender, _Sent())
        sent.settled, sent.replies = settled, dict(replies)
        self.closed = max(self.closed, settled + len(replies))

    def _waiting(self) -> list[_Waiting]:
        """Returns the parts that wait, each rank's in the order of its calls."""
        queues = (*self._open.values(), self._joined)
        return [one for each in queues for queue in each.values() for one in queue]

    def _close_all(self, live: Live) -> list[Delivery]:
        deliveries = [answer for key in list(self._open) for answer in self._close(key, live)]
        if self._joined and live.keys() <= self._joined.keys():
            last = CollectiveResult((torch.tensor([list(self._joined)[-1]], device="cpu"),))
            joined, self._joined = self._joined, {}
            waiting = [one for queue in joined.values() for one in queue]
            deliveries += [answer for one in waiting for answer in self._settle(one, last)]
        return deliveries

    def _close(self, key: Key, live: Live) -> list[Delivery]:
        """Closes the rounds of a key that are complete."""
        deliveries: list[Delivery] = []
        queues = self._open[key]
        members = sorted(live.keys() & key[0] if key[0] else live.keys())
        while any(queues.values()) and all(queues.get(rank) or rank in self._joined for rank in members):
            deliveries += self._close_one(key, members)
        if not any(queues.values()):
            del self._open[key]
        return deliveries

    def _close_one(self, key: Key, members: Collection[int]) -> list[Delivery]:
        self.closed += 1
        queues = self._open[key]
        round_ = {rank: queues[rank].pop(0) for rank in members if queues.get(rank)}
        parts = [Part(rank, one.request.call, one.request.tensors) for rank, one in round_.items()]
        results = outcome(parts, joined=[rank for rank in members if rank not in round_])
        replies: dict[int, Reply] = {
            rank: results if isinstance(results, Refusal) else CollectiveResult(results[rank])
            for rank in round_
        }
        if self.kept is not None:
            self.kept.setdefault(key, []).append(replies)
            given = () if isinstance(results, Refusal) else results.values()
            nbytes = {id(one): one.nbytes for tensors in given for one in tensors}  # ranks share results
            self._room -= ROUND_BYTES + sum(nbytes.values())
            if self._room < 0:
                self.drop_results()
        return [answer for rank, one in round_.items() for answer in self._settle(one, replies[rank])]

    def _settle(self, waiting: _Waiting, reply: Reply) -> list[Delivery]:
        sent = self._sent.setdefault(waiting.request.sender, _Sent())
        sent.replies[waiting.request.sequence] = reply
        return waiting.answer(reply)


def _key(request: Contribute) -> Key:
    return request.call.ranks, request.call.name


def _refusal(request: Contribute, settled: int) -> Refusal | None:
    """Returns why a part is invalid; its sender has confirmed all replies up to `settled`."""
    rank, call = request.sender.rank, request.call
    if request.sequence <= settled:
        text = f"rank {rank} sent call {request.sequence} ({call.name!r}) after it confirmed the reply"
        return Refusal(Code.OUT_OF_ORDER, f"{text}; number the calls in increasing order")
    if call.ranks and rank not in call.ranks:
        text = f"rank {rank} is not a member of {call.name!r}; only ranks {list(call.ranks)} can call it"
        return Refusal(Code.BAD_REQUEST, text)
    return None


def _late(request: Contribute, earlier: Contribute) -> Refusal:
    return Refusal(
        Code.OUT_OF_ORDER,
        f"rank {request.sender.rank} sent call {request.sequence} of {request.call.name!r} after its call"
        f" {earlier.sequence}, which is still open; number the calls of a name in increasing order",
    )


def _fenced(request: Contribute) -> Refusal:
    rank, name = request.sender.rank, request.call.name
    return Refusal(
        Code.FENCED, f"rank {rank} was removed from the job while it waited in {name!r}; restart the worker"
    )

"""The gradient exchanges of one member of a ring that heals.

Law: members complete the same exchanges, in one order. An exchange is what is sent before a wait. It is
complete on a member once every bucket has its mean there, and only then do means replace gradients. So after
a loss, a member either has all means of an exchange or all its own gradients, and can exchange them again. A
member completes an exchange only with the gradients of all others, so no member is more than one exchange
ahead. The means of the last complete exchange are kept, for a member that has lost them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hubring.ps.core.work import Work
from hubring.workers.buckets.bucket import Bucket


@dataclass(eq=False, slots=True)
class Sent:
    """One bucket's part of an exchange.

    Attributes:
        bucket: The bucket. Its memory has this member's gradients until the exchange is complete.
        wire: A copy that becomes the mean, and behind it one element that is not zero if a member knows of
            newcomers.
        arrived: Whether `wire` is the mean.
        filled: When a GPU has filled the wire.
    """

    bucket: Bucket
    wire: Tensor
    arrived: bool = False
    filled: torch.cuda.Event | None = None

    def fill(self, *, newcomers: bool) -> None:
        """Copies the gradients to the wire."""
        self.wire[:-1].copy_(self.bucket.memory)
        self.wire[-1] = float(newcomers)
        if self.wire.is_cuda:
            self.filled = torch.cuda.current_stream(self.wire.device).record_event()

    def ready(self) -> Tensor:
        """Returns the wire for this thread, whose stream waits until another thread's has filled it."""
        if self.filled is not None:
            torch.cuda.current_stream(self.wire.device).wait_event(self.filled)
        return self.wire


@dataclass(eq=False, slots=True)
class Exchange:
    """One exchange.

    Attributes:
        number: Counts the exchanges.
        step: Completed steps when it began.
        sent: Its buckets, in order.
        closed: Whether a wait has begun, so that nothing more is sent.
    """

    number: int
    step: int
    sent: list[Sent] = field(default_factory=list)
    closed: bool = False

    @property
    def complete(self) -> bool:
        return self.closed and all(one.arrived for one in self.sent)

    @property
    def knows_newcomers(self) -> bool:
        """Whether a member knew of newcomers. All members that completed the exchange agree."""
        return any(bool(one.wire[-1]) for one in self.sent)


class ExchangeLog:
    """The last complete exchange and the one in flight. Not safe to use from several threads at once."""

    def __init__(self) -> None:
        self.last = Exchange(0, -1, closed=True)
        self.in_flight: Exchange | None = None
        self._free: defaultdict[tuple[int, torch.dtype, torch.device], list[Tensor]] = defaultdict(list)

    @property
    def latest(self) -> Exchange:
        """The last exchange that is complete on this member, whether or not its means are in place."""
        here = self.in_flight
        return here if here is not None and here.complete else self.last

    @property
    def step(self) -> int:
        """Completed steps, as far as exchanges tell."""
        here = self.latest
        return here.step + 1 if self.in_flight is None or self.in_flight is here else self.in_flight.step

    def send(self, bucket: Bucket, step: int, *, newcomers: bool) -> tuple[Exchange, Sent]:
        """Adds a bucket to the exchange in flight, or to a new one."""
        if self.in_flight is None:
            self.in_flight = Exchange(self.last.number + 1, step)
        one = Sent(bucket, self._wire(bucket.memory))
        one.fill(newcomers=newcomers)
        self.in_flight.sent.append(one)
        return self.in_flight, one

    def complete(self) -> Exchange:
        """Replaces the gradients with the means of the exchange in flight, which is complete."""
        exchange, self.in_flight = self.in_flight, None
        assert exchange is not None
        for one in exchange.sent:
            one.bucket.memory.copy_(one.wire[:-1])
        for one in self.last.sent:
            self._free[_kind(one.wire)].append(one.wire)
        self.last = exchange
        return exchange

    def begin_again(self, *, newcomers: bool) -> None:
        """Prepares an exchange that is not complete to be sent again, in other memory."""
        if self.in_flight is None or self.in_flight.complete:
            return
        for one in self.in_flight.sent:
            one.wire, one.arrived = torch.empty_like(one.ready()), False
            one.fill(newcomers=newcomers)

    def follow(self, position: int, step: int) -> None:
        """Continues at the position of the other members, on a newcomer."""
        self.last = Exchange(position, step - 1, closed=True)

    def _wire(self, memory: Tensor) -> Tensor:
        free = self._free[memory.numel() + 1, memory.dtype, memory.device]
        return free.pop() if free else memory.new_empty(memory.numel() + 1)


def _kind(wire: Tensor) -> tuple[int, torch.dtype, torch.device]:
    return wire.numel(), wire.dtype, wire.device


Settle = Callable[[Exchange, float | None], None]
"""Waits until an exchange is complete, at most the given seconds."""


class ExchangeWork(Work):
    """A bucket's part of an exchange. All parts are done together, once one of them is waited for.

    Args:
        what: See `Work`.
        exchange: The exchange.
        settle: See `Settle`.
    """

    def __init__(self, what: str, exchange: Exchange, settle: Settle) -> None:
        super().__init__(what)
        self._exchange, self._settle = exchange, settle

    def wait(self, timeout: float | None = None) -> None:
        self._settle(self._exchange, timeout)
        self.complete_part()

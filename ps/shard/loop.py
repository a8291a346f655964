"""A shard's loop: Message -> KVStore -> Replies.

One thread polls every listener and feeds the store; nothing in here waits for
anything else. What the coordinator wants of the shard arrives on gRPC threads
and is handed to the loop as a command, so that the store is touched by one
thread only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from hubring.ps.core.counters import Service, Traffic
from hubring.ps.core.errors import HubringError
from hubring.ps.core.messages import Code, Contribute, Delivery, Refusal, Request
from hubring.ps.core.trace import Trace
from hubring.ps.core.types import BucketSpec, Slice
from hubring.ps.store.consistency import Consistency
from hubring.ps.store.parameter_memory import ParameterMemory
from hubring.ps.store.store import KVStore
from hubring.ps.transport import wire
from hubring.ps.transport.base import Envelope, Listener, ReturnPath
from hubring.ps.transport.poller import poller
from hubring.ps.transport.spin_wait import SpinWait

log = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Ticket:
    """The way back of one reply.

    Attributes:
        listener: Who brought the request.
        reply_to: Whom it brought it from.
        request: Its number there.
        rank: Whose request it is.
        since: When it was taken up, by `time.monotonic_ns`.
    """

    listener: Listener
    reply_to: ReturnPath
    request: int
    rank: int
    since: int

    def __hash__(self) -> int:
        return id(self)


class ShardLoop:
    """Feeds one store from many listeners.

    Args:
        consistency: The policy of every store that this shard will hold.
        listeners: Where workers reach it; closed when `run` returns.
        memory: Where each store keeps its parameters; None: in memory of this process alone.
        trace: Where what the shard does is noted; None: nowhere.
    """

    def __init__(
        self,
        consistency: Consistency,
        listeners: list[Listener],
        memory: ParameterMemory | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._make_store = partial(KVStore, consistency, memory)
        self.store = self._make_store()
        self.traffic = Traffic()
        self.service = Service()
        self._trace = trace
        self._now = 0
        """When the loop began what it is at."""
        self.after_turn: Callable[[], None] | None = None
        """Called in the loop whenever the store has changed; for whoever waits for a snapshot."""
        self._listeners = listeners
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not when the loop ends: whoever comes too late with a command still writes there.
        weakref.finalize(self, os.close, self._wake)
        self._stopping = False
        self._ended = False

    def run(self) -> None:
        """Serves until `stop`."""
        news = poller(self._wake, *(listener.waitable for listener in self._listeners))
        spin_wait = SpinWait(news.poll)
        try:
            while not self._stopping:
                ready = spin_wait.wait()
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    self._obey()
                for listener in self._listeners:
                    if listener.waitable in ready:
                        envelopes, arrived = listener.receive(), time.monotonic_ns()
                        for envelope in envelopes:
                            self._serve(listener, envelope, arrived)
                for listener in self._listeners:
                    listener.flush()
                if self.after_turn is not None:
                    self.after_turn()
        finally:
            self._ended = True
            self._obey()
            news.close()
            for listener in self._listeners:
                listener.close()
            if self._trace is not None:
                self._trace.close()

    def stop(self) -> None:
        """Ends the loop; from any thread."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)

    def command(self, action: Callable[[], _T]) -> Future[_T]:
        """Runs `action` in the loop's thread; from any thread. Cancelled where the loop has ended."""
        future: Future[_T] = Future()

        def run() -> None:
            if self._ended:
                future.cancel()
                return
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)

        self._commands.append(run)
        os.eventfd_write(self._wake, 1)
        if self._ended:
            self._obey()
        return future

    def reset(self) -> None:
        """Forgets the job; in the loop's thread."""
        self.store = self._make_store()
        self.traffic.clear()
        self.service.clear()

    def assign(self, slices: Sequence[Slice], buckets: Sequence[BucketSpec]) -> None:
        """As the store's, and counts the traffic from here on; in the loop's thread."""
        self.store.assign(slices, buckets)
        self.traffic.clear()
        self.service.clear()

    def send(self, deliveries: list[Delivery]) -> None:
        """Sends what the store wants sent; in the loop's thread."""
        for ticket, reply in deliveries:
            assert isinstance(ticket, Ticket)
            if ticket.since < self._now:
                self.service.held[ticket.rank] += self._now - ticket.since
            message = wire.encode_reply(reply, ticket.request)
            if message.payload is not None:
                self.traffic.bytes_sent += message.payload.nbytes
            ticket.listener.send(ticket.reply_to, message, stable=getattr(reply, "stable", False))

    def _obey(self) -> None:
        """Takes all commands; after the loop's end whoever gives one does this too, so that none is left."""
        with contextlib.suppress(IndexError):
            while True:
                command, self._now = self._commands.popleft(), time.monotonic_ns()
                command()

    def _serve(self, listener: Listener, envelope: Envelope, arrived: int) -> None:
        began = self._now = time.monotonic_ns()
        request = self._answer(listener, envelope)
        ended = time.monotonic_ns()
        self.service.queued += began - arrived
        self.service.handled += ended - began
        if self._trace is not None and request is not None:
            self._trace.span("serves", _title(request), began, ended)

    def _answer(self, listener: Listener, envelope: Envelope) -> Request | None:
        """Answers whom it can; returns what was asked, if that could be read."""
        message = envelope.message
        if message.payload is not None:
            self.traffic.bytes_received += message.payload.nbytes
        try:
            number, request = wire.decode_request(message)
        except wire.MalformedMessage as error:
            log.warning("refused a message: %s", error)
            if error.request is not None:  # else there is no number to answer to
                nobody = Ticket(listener, envelope.reply_to, error.request, -1, self._now)
                self.send([Delivery(nobody, _bad(error))])
            return None
        ticket = Ticket(listener, envelope.reply_to, number, request.sender.rank, self._now)
        try:
            deliveries = self.store.handle(request, ticket)
        except HubringError as error:
            deliveries = [Delivery(ticket, _bad(error))]
        self.send(deliveries)
        return request


def _title(request: Request) -> str:
    what = request.call.name if isinstance(request, Contribute) else f"key {request.key}"
    return f"{type(request).__name__.lower()} {what} of w{request.sender.rank}"


def _bad(error: HubringError) -> Refusal:
    return Refusal(Code.BAD_REQUEST, str(error))

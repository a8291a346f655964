"""A shard's loop: Message -> KVStore -> Replies.

One thread polls every listener and passes requests to the store. The loop never
blocks on anything else. The coordinator's calls arrive on gRPC threads, which pass
them to the loop as commands, so that only one thread uses the store.
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
from hubring.ps.core.messages import (
    Code,
    Contribute,
    Delivery,
    Missing,
    Probe,
    Refusal,
    Request,
)
from hubring.ps.core.rejections import Rejections
from hubring.ps.core.trace import Trace
from hubring.ps.core.types import BucketSpec, Sender, Slice
from hubring.ps.store.consistency import Consistency
from hubring.ps.store.parameter_memory import ParameterMemory
from hubring.ps.store.store import KVStore
from hubring.ps.transport import wire
from hubring.ps.transport.base import Envelope, Listener, ReturnPath
from hubring.ps.transport.poller import poller
from hubring.ps.transport.spin_wait import SpinWait

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_NO_SENDER = Sender(-1, 0)
"""The sender of a message that cannot be read."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The return path of one reply.

    Attributes:
        listener: The listener that received the request.
        reply_to: The listener's return path to the sender.
        request: The sender's number of the request.
        sender: The sender.
        since: When the loop began to handle the request, by `time.monotonic_ns`.
    """

    listener: Listener
    reply_to: ReturnPath
    request: int
    sender: Sender
    since: int

    def __hash__(self) -> int:
        return id(self)


class ShardLoop:
    """Serves one store to many listeners.

    Args:
        consistency: The policy of every store of this shard.
        listeners: The listeners for workers; closed when `run` returns.
        memory: The memory for each store's parameters; None uses this process's private memory.
        trace: Where to record the shard's work; None disables the trace.
        rejections: Counts what this process refuses.
    """

    def __init__(
        self,
        consistency: Consistency,
        listeners: list[Listener],
        memory: ParameterMemory | None = None,
        trace: Trace | None = None,
        rejections: Rejections | None = None,
    ) -> None:
        self._make_store = partial(KVStore, consistency, memory)
        self.store = self._make_store()
        self.traffic = Traffic()
        self.service = Service()
        self.rejections = rejections or Rejections()
        self._trace = trace
        self._now = 0
        """When the current request or command began, by `time.monotonic_ns`."""
        self.after_turn: Callable[[], None] | None = None
        """Called in the loop after each turn, so that a waiting save can check its snapshot."""
        self._unanswered: set[tuple[Sender, int]] = set()
        """The requests that wait for their reply, by sender and number."""
        self._listeners = listeners
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not closed when the loop ends: a late `command` still writes to it.
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
                    self._run_commands()
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
            self._run_commands()
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
        """Runs `action` in the loop's thread; from any thread. Cancelled if the loop has ended."""
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
            self._run_commands()
        return future

    def reset(self) -> None:
        """Discards the job's state; in the loop's thread."""
        self.store = self._make_store()
        self._unanswered.clear()
        self.traffic.clear()
        self.service.clear()

    def assign(self, slices: Sequence[Slice], buckets: Sequence[BucketSpec]) -> None:
        """Calls the store's `assign` and resets the traffic counters; in the loop's thread."""
        self.store.assign(slices, buckets)
        self.traffic.clear()
        self.service.clear()

    def send(self, deliveries: list[Delivery]) -> None:
        """Sends the store's replies; in the loop's thread."""
        for ticket, reply in deliveries:
            assert isinstance(ticket, Ticket)
            if ticket.since < self._now:
                self.service.held[ticket.sender.rank] += self._now - ticket.since
            self._unanswered.discard((ticket.sender, ticket.request))
            message = wire.encode_reply(reply, ticket.request)
            if message.payload is not None:
                self.traffic.bytes_sent += message.payload.nbytes
            ticket.listener.send(ticket.reply_to, message, stable=getattr(reply, "stable", False))

    def _run_commands(self) -> None:
        """Runs all commands. After the loop's end `command` calls this too, so that no command is left."""
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
        """Handles one message and sends the replies; returns the request if it is the store's."""
        message = envelope.message
        if message.damage:
            self._ask_again(listener, envelope)
            return None
        if message.payload is not None:
            self.traffic.bytes_received += message.payload.nbytes
        try:
            number, request = wire.decode_request(message)
        except wire.MalformedMessage as error:
            self.rejections.add("message", log, f"refused a message: {error}")
            if error.request is not None:  # without a request number there is nothing to answer
                unknown = Ticket(listener, envelope.reply_to, error.request, _NO_SENDER, self._now)
                self.send([Delivery(unknown, _bad(error))])
            return None
        ticket = Ticket(listener, envelope.reply_to, number, request.sender, self._now)
        if isinstance(request, Probe):
            self.send([Delivery(ticket, self._missing(request))])
            return None
        self._unanswered.add((request.sender, number))
        try:
            deliveries = self.store.handle(request, ticket)
        except HubringError as error:
            deliveries = [Delivery(ticket, _bad(error))]
        self.send(deliveries)
        return request

    def _ask_again(self, listener: Listener, envelope: Envelope) -> None:
        """Counts a message that does not match its checksum, and asks its sender to send it again."""
        message = envelope.message
        number, sender = wire.origin(message)
        if self.store.is_live(sender):
            self.service.damaged += 1
            log.warning(
                "refused a message of rank %d: %s; it will be sent again", sender.rank, message.damage
            )
        else:  # a header that cannot be read, or a stranger
            self.rejections.add("damage", log, f"refused a message: {message.damage}")
        ticket = Ticket(listener, envelope.reply_to, number, _NO_SENDER, self._now)
        self.send([Delivery(ticket, Refusal(Code.RESEND, message.damage))])

    def _missing(self, probe: Probe) -> Missing:
        """Returns which requests wait for no reply: they never came, or are answered."""
        return Missing(tuple(n for n in probe.requests if (probe.sender, n) not in self._unanswered))


def _title(request: Request) -> str:
    what = request.call.name if isinstance(request, Contribute) else f"key {request.key}"
    return f"{type(request).__name__.lower()} {what} of w{request.sender.rank}"


def _bad(error: HubringError) -> Refusal:
    return Refusal(Code.BAD_REQUEST, str(error))

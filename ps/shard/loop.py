"""A shard's loop: Message -> KVStore -> Replies.

One thread polls every listener and passes requests to the store. The loop never
blocks on anything else. The coordinator's calls arrive on gRPC threads, which pass
them to the loop as commands, so that only one thread uses the store.

With a standby the replies wait in its stream (`hubring.ps.shard.standby_stream`). A standby's own loop
applies what its primary forwards, and refuses all else until it is promoted (`hubring.ps.shard.standby`).
"""

from __future__ import annotations

import contextlib
import logging
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, TypeVar

from hubring.ps.core.bounds import Rejections
from hubring.ps.core.counters import Service, Traffic
from hubring.ps.core.errors import SHARD_REPLACED, HubringError
from hubring.ps.core.messages import (
    Code,
    Contribute,
    CoordinatorCall,
    Delivery,
    Forwarded,
    Missing,
    Probe,
    Refusal,
    Request,
    StoreCommand,
)
from hubring.ps.core.trace import Trace
from hubring.ps.core.types import BucketSpec, Sender, Slice
from hubring.ps.shard.standby_stream import CallHistory, Stream, lasting, pass_failure, without_checkpoint
from hubring.ps.store.consistency import Consistency
from hubring.ps.store.parameter_memory import ParameterMemory
from hubring.ps.store.store import KVStore
from hubring.ps.transport.base import Connection, Envelope, Listener, ReturnPath
from hubring.ps.transport.decode import MalformedMessage, decode_request, origin
from hubring.ps.transport.encode import encode_reply
from hubring.ps.transport.polling import Bell, SpinWait, poller

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Ticket(NamedTuple):
    """The return path of the reply to one request.

    `request` is the sender's number of it; the loop began to handle it at `since`, by `time.monotonic_ns`.
    """

    listener: Listener
    reply_to: ReturnPath
    request: int
    sender: Sender
    since: int


StandBy = Callable[[int, Request | Probe | Forwarded, Ticket], list[Delivery]]

SUPERSEDED = Refusal(Code.FENCED, SHARD_REPLACED)
OTHER_STREAM = Refusal(Code.OTHER_STREAM, "this process is not the standby of this stream")

_NO_SENDER = Sender(-1, 0)
"""The sender of a message that cannot be read."""


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
        self._stream: Stream | None = None
        """Forwards all changes to the standby; None without one."""
        self._stand_by: StandBy | None = None
        """Answers all that comes to a standby until it is promoted; None in a shard."""
        self._followed: bytes | None = None
        """The secret of the stream that this process follows, or followed until it was promoted."""
        self._history = CallHistory()
        self._changes: set[Future[None]] = set()
        """The coordinator's calls that wait for the standby."""
        self._unanswered: set[tuple[Sender, int]] = set()
        """The requests that wait for their reply, by sender and number."""
        self._listeners = {listener.waitable: listener for listener in listeners}
        self._used: set[Listener] = set()
        """Those that received or sent something in this turn, and may have buffered it."""
        self._bell = Bell()
        """Rings for commands, and to stop."""
        self._news = poller(*self._listeners, self._bell.waitable)
        self._commands: deque[Callable[[], None]] = deque()
        self._stopping = self._ended = False

    def run(self) -> None:
        """Serves until `stop`."""
        spin_wait = SpinWait(self._news.poll)
        try:
            while not self._stopping:
                ready = spin_wait.wait(None if self._stream is None else self._stream.patience)
                if self._bell.waitable in ready:
                    self._bell.clear()
                    self._run_commands()
                for waitable in ready:
                    if (listener := self._listeners.get(waitable)) is not None:
                        self._used.add(listener)
                        envelopes, arrived = listener.receive(), time.monotonic_ns()
                        for envelope in envelopes:
                            self._serve(listener, envelope, arrived)
                if self._stream is not None:
                    if self._stream.waitable in ready:
                        self._now = time.monotonic_ns()
                        self._stream.receive()
                    self._stream.check()
                    self._stream.flush()
                while self._used:
                    self._used.pop().flush()
                if self.after_turn is not None:
                    self.after_turn()
        finally:
            self._ended = True
            self._run_commands()
            if self._stream is not None:
                self._stream.close()
            for future in list(self._changes):
                future.cancel()
            self._news.close()
            self._bell.close()
            for listener in self._listeners.values():
                listener.close()
            if self._trace is not None:
                self._trace.close()

    def stop(self) -> None:
        """Ends the loop; from any thread."""
        self._stopping = True
        self._bell.ring()

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
        self._bell.ring()
        if self._ended:
            self._run_commands()
        return future

    # The standby; in the loop's thread.

    def change(self, call: CoordinatorCall, action: Callable[[ShardLoop], None]) -> Future[None]:
        """Runs the action of a coordinator's call, and forwards the call; from any thread.

        The result comes once the standby, if there is one, has the change too.
        """
        changed: Future[None] = Future()

        def run() -> None:
            self._changes.add(changed)
            if self._stream is None:
                self.obey(call, action)
                changed.set_result(None)
                return
            if call.command is StoreCommand.SET_PLAN:  # the standby gets it if it succeeds, and reads no file
                self.obey(call, action)
                plan, restored = without_checkpoint(call)
                self._stream.append(plan)
                for change in self.store.transfer(restored):
                    self._stream.append(change)
            else:
                self._stream.append(call)
                self.obey(call, action)
            self._stream.hold(lambda: changed.set_result(None))

        changed.add_done_callback(self._changes.discard)
        self.command(run).add_done_callback(lambda done: pass_failure(done, changed))
        return changed

    def obey(self, call: CoordinatorCall, action: Callable[[ShardLoop], None]) -> None:
        """Runs the action of a coordinator's call, and remembers the call for a later standby."""
        action(self)
        self._history.note(call)

    @property
    def stream(self) -> tuple[bytes, bool]:
        """The stream's secret, empty without a standby, and whether it is stalled; from any thread."""
        stream = self._stream
        return (b"", False) if stream is None else (stream.secret, stream.stalled)

    def replicate(self, stream: Stream, connection: Connection, received: Future[None]) -> None:
        """Forwards the job's state, and all changes from now on.

        Replaces an earlier stream, whose standby is given up.

        Args:
            stream: The stream.
            connection: Leads to the standby.
            received: Gets a result once the standby has the state, or is given up.
        """
        if self._stream is not None:
            self.leave_standby(self._stream.secret)
        self._stream = stream
        self._news.register(stream.waitable, select.EPOLLIN)
        for change in (*self._history.calls(), *self.store.transfer()):
            stream.append(change)
        self.store.replicate(stream)
        self._changes.add(received)
        received.add_done_callback(self._changes.discard)
        stream.hold(lambda: received.set_result(None))
        stream.attach(connection)

    def rejoin(self, secret: bytes, connection: Connection) -> None:
        """Uses a new connection for the stream with this secret."""
        if self._stream is not None and self._stream.secret == secret:
            self._stream.attach(connection)
        else:
            connection.close()

    def leave_standby(self, secret: bytes) -> None:
        """Ends the stream with this secret, because its standby is given up. Releases all replies."""
        if self._stream is None or self._stream.secret != secret:
            return
        log.warning("this shard has no standby any more: if it is lost, so are its steps")
        stream, self._stream = self._stream, None
        self.store.replicate(None)
        self._news.unregister(stream.waitable)
        stream.leave()
        stream.close()

    def follow(self, stream: bytes | None, stand_by: StandBy) -> None:
        """Becomes a standby: `stand_by` applies what comes from its primary, and refuses all else.

        Args:
            stream: The secret of the primary's stream; None before there is a primary.
            stand_by: Answers each message, from its number, what it asks and where the answer goes.
        """
        self.reset()
        self._history = CallHistory()
        self._followed, self._stand_by = stream, stand_by

    def promote(self) -> None:
        """Takes the primary's place. From now on the primary is refused. A second call changes nothing."""
        self._stand_by = None

    def reset(self) -> None:
        """Discards the job's state; in the loop's thread."""
        self.store = self._make_store()
        self.store.replicate(self._stream)
        self._unanswered.clear()
        self.traffic.clear()
        self.service.clear()

    def assign(self, slices: Sequence[Slice], buckets: Sequence[BucketSpec]) -> None:
        """Calls the store's `assign` and resets the traffic counters; in the loop's thread."""
        self.store.assign(slices, buckets)
        self.traffic.clear()
        self.service.clear()

    def send(self, deliveries: list[Delivery]) -> None:
        """Sends the store's replies, after the standby has what they are about; in the loop's thread."""
        if self._stream is None or not deliveries:
            self._send_now(deliveries)
        else:
            kept = [Delivery(ticket, lasting(reply)) for ticket, reply in deliveries]
            self._stream.hold(lambda: self._send_now(kept))

    def _send_now(self, deliveries: list[Delivery]) -> None:
        for ticket, reply in deliveries:
            if ticket is None:  # a standby's; the worker sends its request again
                continue
            assert isinstance(ticket, Ticket)
            if ticket.since < self._now and ticket.sender is not _NO_SENDER:
                self.service.held[ticket.sender.rank] += self._now - ticket.since
            self._unanswered.discard((ticket.sender, ticket.request))
            message = encode_reply(reply, ticket.request)
            if message.payload is not None:
                self.traffic.bytes_sent += message.payload.nbytes
            ticket.listener.send(ticket.reply_to, message, stable=getattr(reply, "stable", False))
            self._used.add(ticket.listener)

    def _run_commands(self) -> None:
        """Runs all commands. After the loop's end `command` calls this too, so that no command is left."""
        with contextlib.suppress(IndexError):
            while True:
                command, self._now = self._commands.popleft(), time.monotonic_ns()
                if self._stream is not None:
                    self._stream.begin()
                command()

    def _serve(self, listener: Listener, envelope: Envelope, arrived: int) -> None:
        began = self._now = time.monotonic_ns()
        if self._stream is not None:
            self._stream.begin()
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
            number, request = decode_request(message)
        except MalformedMessage as error:
            self.rejections.add("message", log, f"refused a message: {error}")
            if error.request is not None:  # without a request number there is nothing to answer
                unknown = Ticket(listener, envelope.reply_to, error.request, _NO_SENDER, self._now)
                self.send([Delivery(unknown, _bad(error))])
            return None
        sender = _NO_SENDER if isinstance(request, Forwarded) else request.sender
        ticket = Ticket(listener, envelope.reply_to, number, sender, self._now)
        if self._stand_by is not None:
            self.send(self._stand_by(number, request, ticket))
            return None
        if isinstance(request, Forwarded):
            self.send([Delivery(ticket, SUPERSEDED if request.stream == self._followed else OTHER_STREAM)])
            return None
        if isinstance(request, Probe):
            self.send([Delivery(ticket, self._missing(request))])
            return None
        self._unanswered.add((request.sender, number))
        try:
            deliveries = self.store.handle(request, ticket)
        except HubringError as error:
            deliveries = [Delivery(ticket, _bad(error))]
        if deliveries:
            self.send(deliveries)
        return request

    def _ask_again(self, listener: Listener, envelope: Envelope) -> None:
        """Counts a message that does not match its checksum, and asks its sender to send it again."""
        message = envelope.message
        number, sender = origin(message)
        if self.store.is_live(sender):
            self.service.damaged += 1
            text = "refused a message of rank %d: %s; it will be sent again"
            log.warning(text, sender.rank, message.damage)
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

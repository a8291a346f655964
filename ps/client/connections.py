"""A client's connections to its shards: who makes a request sends it, who waits for an answer reads it.

Handed from thread to thread, a small push would be woken for twice more than the
wire asks: that is half of its time. So a request leaves in the thread that makes it,
and whoever waits reads the connections itself until its answer is there (`attend`). While
nobody waits, as during backward, the connections' own thread reads them; it alone dials,
and dials again when a connection broke. The shards' ledgers make it safe to send again.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hubring.ps.client.batch import Batch, Batches
from hubring.ps.client.send_window import SendWindow
from hubring.ps.core.counters import Traffic
from hubring.ps.core.errors import ConnectionLost, HubringError, ServerUnreachable
from hubring.ps.core.messages import Reply
from hubring.ps.core.work import Work
from hubring.ps.transport import wire
from hubring.ps.transport.bell import Bell
from hubring.ps.transport.bundle import bytes_of
from hubring.ps.transport.poller import poller
from hubring.ps.transport.spin_wait import SpinWait

if TYPE_CHECKING:
    from torch import Tensor

    from hubring.ps.transport.base import Connection, Message
    from hubring.ps.transport.registry import Dial

log = logging.getLogger(__name__)

REDIAL_SECONDS = 11.0
"""Longer than a lease and than a server may be silent: who knows why a shard is gone speaks first."""
MAX_LOSSES = 10
"""Times that one connection may break within `REDIAL_SECONDS`; after that dialling again does not help."""
_REDIAL_PAUSE = 0.1
_LONGEST_POLL = 3600.0
"""Seconds; epoll's own bound is 24 days, and a deadline may lie beyond."""


@dataclass(frozen=True, slots=True)
class Inflight:
    """A request, kept until its reply so that it can be sent again.

    Attributes:
        number: By which its reply is known.
        shard: Whom it goes to.
        message: The request, encoded.
        into: Where the reply's payload should land.
        settle: Takes the reply; what it raises fails `work`.
        work: Of which this is one part.
    """

    number: int
    shard: int
    message: Message
    into: Tensor | None
    settle: Callable[[Reply], None]
    work: Work

    @property
    def nbytes(self) -> int:
        """That it brings to the shard."""
        return 0 if self.message.payload is None else self.message.payload.nbytes


class Connections:
    """Connections to a set of shards, and the calls under way on them.

    Args:
        shards: How many there are.
        dial: Connects to one of them; called in the connections' own thread, again after a loss.
        traffic: Counts the payloads.
        bounded: None is to run further ahead of its answers than `hubring.ps.client.send_window` lets it.
    """

    def __init__(self, shards: int, dial: Dial, traffic: Traffic, *, bounded: bool = True) -> None:
        self.connected = Work("connecting to the shards")
        self._shards = shards
        self._dial = dial
        self._traffic = traffic
        self._lock = threading.Lock()
        """Guards the calls."""
        self._windows = [SendWindow[Inflight](bounded=bounded) for _ in range(shards)]
        """By shard, what was handed in and has not left."""
        self._under_way: dict[int, Inflight] = {}
        self._failure: BaseException | None = None
        self._batches: Batches = set()
        """Of those who collect requests."""
        self._hands = threading.Lock()
        """Held, for moments, by whoever sends or reads."""
        self._connections: dict[int, Connection] = {}
        """By their shards; a broken one is missing until it was dialled again."""
        self._broken: deque[tuple[int, ConnectionLost]] = deque()
        self._losses: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_LOSSES))
        """When each shard's connection broke."""
        self._attended = threading.Lock()
        """Held by whoever waits and reads; the connections' own thread is not told of news meanwhile."""
        self._closing = False
        self._bell = Bell()
        self._news = poller(self._bell.waitable)
        """Of the connections: replies, and by the bell requests that wait."""
        self._spin_wait = SpinWait(self._news.poll)
        self._chore_bell = Bell()
        self._chores = poller(self._chore_bell.waitable, self._news.fileno())
        """Of our own thread: the news, unless somebody attends; by the bell, what it alone can do."""
        self._thread = threading.Thread(target=self._keep, name="connections", daemon=True)
        self._thread.start()

    # What any thread may call.

    def submit(self, call: Inflight) -> None:
        """Sends a request; its memory is the connections' until its work is over."""
        with self._lock:
            failure = self._failure
            if failure is None:
                self._windows[call.shard].put(call, call.message.priority, call.nbytes)
        if failure is not None:
            call.work.fail(failure)
        else:
            self._let_out()

    def batched(self) -> Batch:
        """Collects the requests made while this is entered: what leaves together wakes a shard once."""
        return Batch(self._batches, self._let_out)

    def attend(self, work: Work, timeout: float | None) -> None:
        """Reads the answers until `work`, which only calls complete, is over or for `timeout` seconds.

        Returns at once where another thread attends: that one reads for all, and then the connections' own.
        """
        if not self._attended.acquire(blocking=False):
            return
        try:
            if not self._closing:
                self._read_for(work, None if timeout is None else time.monotonic() + timeout)
        finally:
            self._attended.release()
            if any(self._windows):
                self._bell.ring()  # from now on it is the connections' own thread that lets it out

    def fail(self, error: BaseException) -> None:
        """Fails everything under way and everything still to come."""
        with self._lock:
            if self._failure is None:
                self._failure = error
            waiting = (call for window in self._windows for call in window.clear())
            calls = [*self._under_way.values(), *waiting]
            self._under_way.clear()
        with contextlib.ExitStack() as stack:  # each is told, whatever another's callback raises
            stack.callback(self._bell.ring)
            for call in calls:
                stack.callback(call.work.fail, error)
            stack.callback(self.connected.fail, error)

    def close(self) -> None:
        """Ends the thread and the connections; what is under way fails."""
        if self._closing:
            return
        self._closing = True
        self._bell.ring()
        self._chore_bell.ring()
        self._thread.join()
        with self._attended:
            for one in (self._bell, self._chore_bell, self._chores, self._news):
                one.close()
        self.fail(ConnectionLost("the client was closed"))

    def _break_off(self, interruption: BaseException) -> None:
        """An exception, a signal's say, came between taking and giving: what was lost, nobody knows."""
        text = f"{type(interruption).__name__} came while requests were sent or answers read: one may be lost"
        self.fail(HubringError(text))

    # Sending and reading, by whoever has the connections in hand.

    @property
    def _batching(self) -> bool:
        return bool(self._batches) and any(batch() is not None for batch in tuple(self._batches))

    def _let_out(self) -> None:
        """Sends all that waits; where another thread is at it, that one will, or the next."""
        if self._batching:
            return  # whoever closes the last batch does
        if not self.connected.done or self._hands.locked():
            self._bell.ring()
            return
        with self._hands:  # unlike between `acquire` and `try`, no signal raises in between (CPython 3.11)
            try:
                self._send_all()
            except BaseException as interruption:
                self._break_off(interruption)
                raise
        if any(self._windows):
            self._bell.ring()  # whoever reads has not known that something is held back

    def _read_for(self, work: Work, end: float | None) -> None:
        self._chores.modify(self._news.fileno(), 0)
        try:
            while not (work.done or self._closing):
                left = None if end is None else min(end - time.monotonic(), _LONGEST_POLL)
                if left is not None and left <= 0:
                    return
                left = self._patience(left)
                ready = self._spin_wait.wait(left)  # what a signal raises here has taken nothing
                try:
                    self._turn(ready)
                except HubringError as error:  # as in the connections' own thread: whoever waits is told
                    self.fail(error)
                except BaseException as interruption:
                    self._break_off(interruption)
                    raise
        finally:
            self._chores.modify(self._news.fileno(), select.EPOLLIN)

    def _turn(self, ready: Collection[int]) -> None:
        """Does what there is to do where something was ready; another thread may have done it since."""
        with self._hands:
            if self._bell.waitable in ready:
                self._bell.clear()
            for shard, connection in list(self._connections.items()):
                if connection.waitable in ready:
                    self._receive(shard, connection)
            self._send_all()

    def _send_all(self) -> None:
        """Sends what was handed in, then lets it out together: a shard that wakes may take our core."""
        addressed = []
        for shard, window in enumerate(self._windows):
            call = self._next_call(window)
            if call is not None:
                addressed.append(shard)
            while call is not None:
                self._send(call)
                call = self._next_call(window)
        for shard in addressed:
            self._flush(shard)

    def _next_call(self, window: SendWindow[Inflight]) -> Inflight | None:
        with self._lock:
            call = None if self._batching else window.take(time.monotonic())
            if call is not None:
                self._under_way[call.number] = call
            return call

    def _patience(self, left: float | None) -> float | None:
        """Of `left` seconds, how many may pass before something should leave that is held back."""
        with self._lock:
            now = time.monotonic()
            held = [window.patience(now) for window in self._windows if window]
        return min(held if left is None else [left, *held], default=None)

    def _send(self, call: Inflight) -> None:
        connection = self._connections.get(call.shard)
        if connection is None:
            return  # until it was dialled again, and all that is under way is sent again
        try:
            connection.send(call.message, None if call.into is None else bytes_of(call.into))
        except ConnectionLost as lost:
            self._drop(call.shard, lost)
        else:
            if call.message.payload is not None:
                self._traffic.bytes_sent += call.message.payload.nbytes

    def _flush(self, shard: int) -> None:
        connection = self._connections.get(shard)
        if connection is not None:
            try:
                connection.flush()
            except ConnectionLost as lost:
                self._drop(shard, lost)

    def _receive(self, shard: int, connection: Connection) -> None:
        try:
            for message in connection.receive():
                self._answer(message)
        except ConnectionLost as lost:
            self._drop(shard, lost)

    def _answer(self, message: Message) -> None:
        number, reply = wire.decode_reply(message)
        with self._lock:
            call = self._under_way.pop(number, None)
            if call is not None:
                self._windows[call.shard].answered(call.nbytes, time.monotonic())
        if call is None:
            return  # answered already: this is the second answer to a request sent twice
        if message.payload is not None:
            self._traffic.bytes_received += message.payload.nbytes
        try:
            call.settle(reply)
        except Exception as error:  # whatever it is, somebody waits for this call
            call.work.fail(error)
        else:
            call.work.complete_part()

    def _drop(self, shard: int, lost: ConnectionLost) -> None:
        """Leaves a broken connection to the connections' own thread."""
        connection = self._connections.pop(shard)
        self._news.unregister(connection.waitable)
        connection.close()
        self._broken.append((shard, lost))
        self._chore_bell.ring()

    # The connections' own thread.

    def _keep(self) -> None:
        try:
            for shard in range(self._shards):
                self._connect(shard)
            self.connected.complete_part()
            self._let_out()
            while not self._closing:
                attended = self._attended.locked()
                ready = dict(self._chores.poll(None if attended else self._patience(None)))
                if self._chore_bell.waitable in ready:
                    self._chore_bell.clear()
                while self._broken:
                    self._mend(*self._broken.popleft())
                if self._news.fileno() in ready:
                    self._turn(dict(self._news.poll(0)))
                    if self._attended.locked():  # what somebody has begun to wait for may have come just now
                        self._bell.ring()
                elif not self._attended.locked():
                    self._turn({})  # to let out what was held back
        except Exception as error:
            self.fail(error)
        finally:
            with self._hands:
                for connection in self._connections.values():
                    connection.close()
                self._connections.clear()

    def _connect(self, shard: int) -> None:
        """Dials, and sends again what that shard has not answered."""
        connection = self._dial(shard)
        with self._hands:
            self._connections[shard] = connection
            self._news.register(connection.waitable, select.EPOLLIN)
            with self._lock:
                unanswered = [call for _, call in sorted(self._under_way.items()) if call.shard == shard]
            for call in unanswered:
                self._send(call)
            if unanswered:
                self._flush(shard)

    def _mend(self, shard: int, lost: ConnectionLost) -> None:
        """Dials a shard again, for a while."""
        self._note_loss(shard, lost)
        log.warning("connection to shard %d lost (%s); dialling again", shard, lost)
        deadline = time.monotonic() + REDIAL_SECONDS
        while not self._closing:
            if self._failure is not None:
                raise lost
            try:
                self._connect(shard)
                return
            except ServerUnreachable as error:
                if time.monotonic() > deadline:
                    raise ServerUnreachable(
                        f"shard {shard} is gone: {error}; tried again for {REDIAL_SECONDS:g} s. Start the"
                        " server again with its --checkpoint-dir, then the workers"
                    ) from lost
                time.sleep(_REDIAL_PAUSE)

    def _note_loss(self, shard: int, lost: ConnectionLost) -> None:
        """A connection that can be dialled and breaks each time would otherwise be dialled without end."""
        losses = self._losses[shard]
        losses.append(time.monotonic())
        if len(losses) == MAX_LOSSES and losses[-1] - losses[0] < REDIAL_SECONDS:
            raise ConnectionLost(
                f"the connection to shard {shard} broke {MAX_LOSSES} times within {REDIAL_SECONDS:g} s, the"
                f" last time as {lost}; dialling again does not help: see the log of the server"
            )

"""A client's connections to its shards.

Passing a message between threads costs two more wake-ups, half the time of a small push. So the thread that
makes a request also sends it, and the thread that waits for a reply reads the connections itself (`attend`).
While no thread waits or is about to, as during backward, a background thread reads them. Only that one
connects and reconnects. The shards ignore repeated pushes, so it is safe to send requests again: all on a new
connection, and on a living one those that were damaged or lost. A connection that is stuck is replaced.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from weakref import WeakSet

from hubring.ps.client.requests import MAX_PROBED, SILENT_SECONDS, Batch, Inflight, Losses, Requests
from hubring.ps.core.counters import Traffic
from hubring.ps.core.errors import RESTART_ALL, ConnectionLost, HubringError, ServerUnreachable, ShardAwaited
from hubring.ps.core.messages import NO_REQUEST, Code, Missing, Probe, Refusal
from hubring.ps.core.types import Sender
from hubring.ps.core.work import Work
from hubring.ps.transport.base import Connection, Message
from hubring.ps.transport.decode import decode_reply, origin
from hubring.ps.transport.encode import encode_request
from hubring.ps.transport.polling import Bell, SpinWait, poller
from hubring.ps.transport.registry import Dial

log = logging.getLogger(__name__)

REDIAL_SECONDS = 11.0
"""Longer than the server needs to notice a process that ended, and than its silence limit, so that the error
that names the cause arrives before this one."""
MAX_DAMAGED = 10
"""Times that one request or its reply may be damaged before its work fails."""
_LONGEST_POLL = 3600.0  # seconds; epoll's own limit is 24 days, and a deadline may be later


class ShardConnections:
    """The connections to a set of shards and the requests on them.

    Args:
        sender: The client's rank and incarnation.
        shards: Number of shards.
        dial: Connects to a shard. Called in the background thread, and again after a loss.
        traffic: Counts the payload bytes.
        bounded: Whether a `SendWindow` limits the unanswered bytes of each shard.
    """

    def __init__(
        self, sender: Sender, shards: int, dial: Dial, traffic: Traffic, *, bounded: bool = True
    ) -> None:
        self.connected = Work("connecting to the shards")
        self._sender = sender
        self._shards = shards
        self._dial = dial
        self._traffic = traffic
        self._requests = Requests(shards, bounded=bounded)
        self.held = self._requests.held
        self._batches: WeakSet[Batch] = WeakSet()
        """Requests wait until all of them close."""
        self._io_lock = threading.Lock()
        """Held briefly by the thread that sends or reads."""
        self._connections: dict[int, Connection] = {}
        """Open connections by shard. A broken connection is missing until it is reconnected."""
        self._shard_at: dict[int, int] = {}
        """The shard of each open connection, by its descriptor."""
        self._broken: deque[tuple[int, ConnectionLost]] = deque()
        self._stuck: set[int] = set()
        self._losses = Losses(shards, REDIAL_SECONDS)
        self._attending = threading.Lock()
        """Held by a waiting thread that reads. The background thread does not poll `_poller` meanwhile."""
        self._is_left = False
        """Whether the next wait takes the answers, as after `wait_soon`."""
        self._closing = False
        self._bell = Bell()
        self._poller = poller(self._bell.waitable)
        self._spin_wait = SpinWait(self._poller.poll)
        self._reconnect_bell = Bell()
        self._background_poller = poller(self._reconnect_bell.waitable, self._poller.fileno())
        self._thread = threading.Thread(target=self._run, name="connections", daemon=True)
        self._thread.start()

    # Methods that any thread may call.

    def submit(self, call: Inflight) -> None:
        """Sends a request. The connections own its memory until its work completes."""
        if (failure := self._requests.put(call)) is not None:
            call.work.fail(failure)
        else:
            self._send_waiting()

    def batched(self) -> Batch:
        """Collects requests and sends them together, so that each shard wakes once."""
        return Batch(self._batches, self._send_waiting)

    def attend(self, work: Work, timeout: float | None) -> None:
        """Reads replies until `work` completes or `timeout` seconds have passed.

        Returns at once if another thread reads. That one, or the background thread after it, reads all.
        """
        end = None if timeout is None else time.monotonic() + timeout
        if not self._attending.acquire(blocking=False):
            return
        try:
            self._poll_in_background(False)
            while not (work.done or self._closing):
                left = None if end is None else min(end - time.monotonic(), _LONGEST_POLL)
                if left is not None and left <= 0:
                    return
                left = self._requests.sleep_seconds(left)
                ready = self._spin_wait.wait(left)  # an exception from a signal handler loses nothing here
                try:
                    self._process(ready)
                except HubringError as error:  # fail the waiting work, as the background thread does
                    self.fail(error)
                except BaseException as interruption:
                    self._abort(interruption)
                    raise
        finally:
            self._poll_in_background(True)
            self._attending.release()
            if any(self._requests.waiting):  # the background thread sends the rest
                self._bell.ring()

    def wait_soon(self) -> None:
        """Leaves the answers to this thread, from which the background thread would take the GIL for them."""
        self._poll_in_background(False)
        self._is_left = True

    def reconnect(self, shard: int) -> None:
        """Replaces a shard's connection, because another process has taken the shard's place."""
        with self._io_lock:
            self._drop(shard, ConnectionLost("its standby has taken its place"))

    def fail(self, error: BaseException) -> None:
        """Fails all pending and future requests."""
        calls = self._requests.fail(error)
        with contextlib.ExitStack() as stack:  # fail every request even if a callback raises
            stack.callback(self._bell.ring)
            for call in calls:
                stack.callback(call.work.fail, error)
            stack.callback(self.connected.fail, error)

    def close(self) -> None:
        """Stops the thread and closes the connections. Pending requests fail."""
        if self._closing:
            return
        self._closing = True
        self._bell.ring()
        self._reconnect_bell.ring()
        self._thread.join()
        with self._attending:
            for one in (self._bell, self._reconnect_bell, self._background_poller, self._poller):
                one.close()
        self.fail(ConnectionLost("this worker has left the job; train before shutdown() and the last line"))

    def _abort(self, interruption: BaseException) -> None:
        """Fails all requests: an exception interrupted sending or reading, so a message may be lost."""
        name = type(interruption).__name__
        self.fail(HubringError(f"{name} interrupted sending or reading; a request or reply may be lost"))

    # Sending and reading, under `_io_lock`.

    def _send_waiting(self) -> None:
        """Sends all waiting requests, or wakes the thread that can."""
        if self._batches:
            return  # the last open batch sends when it closes
        if self.connected.done and not self._io_lock.locked():
            with self._io_lock:  # no signal handler runs in between, unlike after `acquire` (CPython 3.11)
                try:
                    self._send_all()
                except BaseException as interruption:
                    self._abort(interruption)
                    raise
            if not any(self._requests.waiting):
                return
        if self._is_left:
            self._poll_in_background(True)
        self._bell.ring()  # the reading thread sends the rest, and must recompute how long it may sleep

    def _poll_in_background(self, polls: bool) -> None:
        self._is_left = False
        if not self._closing:
            self._background_poller.modify(self._poller.fileno(), select.EPOLLIN if polls else 0)

    def _process(self, ready: Collection[int]) -> None:
        """Reads from ready connections, which another thread may have read, and sends waiting requests."""
        with self._io_lock:
            if self._bell.waitable in ready:
                self._bell.clear()
            for descriptor in ready:
                if (shard := self._shard_at.get(descriptor)) is not None:
                    self._receive(shard)
            if any(self._requests.waiting) and not self._batches:
                self._send_all()
            if time.monotonic() >= self._requests.silent_from:
                self._probe()

    def _send_all(self) -> None:
        """Sends what may leave, then flushes each shard once, since that wakes it and may cost this core."""
        addressed: dict[int, None] = {}
        for shard, waiting in enumerate(self._requests.waiting):
            # One at a time: meanwhile another thread may fail all, or add one that must leave first.
            while waiting and (call := self._requests.next(shard)) is not None:
                self._send(call, call.into)
                addressed[shard] = None
        for shard in addressed:
            self._flush(shard)

    def _send(self, call: Inflight, into: memoryview | None) -> None:
        call.sent_at = time.monotonic()
        if self._put(call.shard, call.message, into):
            self._traffic.bytes_sent += call.nbytes

    def _put(self, shard: int, message: Message, into: memoryview | None = None) -> bool:
        """Returns whether the message was sent. A request that was not is sent after the reconnect."""
        if (connection := self._connections.get(shard)) is None:
            return False
        try:
            connection.send(message, into)
        except ConnectionLost as lost:
            self._drop(shard, lost)
            return False
        return True

    def _probe(self) -> None:
        """Asks each silent shard which late requests it does not have, or replaces its connection."""
        for shard in range(self._shards):
            late, stuck = self._requests.late(shard)
            if stuck:
                self._stuck.add(shard)
                self._reconnect_bell.ring()
            elif late:
                self._put(shard, encode_request(Probe(self._sender, tuple(late[:MAX_PROBED])), NO_REQUEST))
                self._flush(shard)

    def _flush(self, shard: int) -> None:
        try:
            if (connection := self._connections.get(shard)) is not None:
                connection.flush()
        except ConnectionLost as lost:
            self._drop(shard, lost)

    def _receive(self, shard: int) -> None:
        try:
            for message in self._connections[shard].receive():
                self._answer(shard, message)
        except ConnectionLost as lost:
            self._drop(shard, lost)

    def _answer(self, shard: int, message: Message) -> None:
        if message.damage:
            self._requests.heard(shard)
            self._send_damaged_again(origin(message)[0], f"its reply: {message.damage}")
            return
        number, reply = decode_reply(message)
        if isinstance(reply, (Missing, Refusal)) and self._asks_again(shard, number, reply):
            return
        call = self._requests.take(number)
        if call is None:  # the second reply to a request that was sent twice
            self._requests.heard(shard)
            return
        if message.payload is not None:
            self._traffic.bytes_received += message.payload.nbytes
        try:
            call.settle(reply)
        except Exception as error:  # a thread may be waiting for this request
            call.work.fail(error)
        else:
            call.work.complete_part()

    def _asks_again(self, shard: int, number: int, reply: Missing | Refusal) -> bool:
        """Sends again what a shard lacks, or received damaged. Returns whether the reply asks for that."""
        if isinstance(reply, Refusal) and reply.code is not Code.RESEND:
            return False
        self._requests.heard(shard, holds=isinstance(reply, Missing) and not reply.requests)
        if isinstance(reply, Missing):
            self._send_again(shard, reply.requests, "lost requests or replies")
        elif number == NO_REQUEST:
            raise ConnectionLost(f"the shard received {reply.text}")
        else:
            self._send_damaged_again(number, f"the shard received {reply.text}")
        return True

    def _send_damaged_again(self, number: int, why: str) -> None:
        """Sends a request again that was damaged, or whose reply was, at most MAX_DAMAGED times."""
        for call in self._requests.under_way([number]):
            call.damaged += 1
            if call.damaged < MAX_DAMAGED:
                self._send_again(call.shard, [number], why)
            elif self._requests.take(number) is not None:
                text = f"shard {call.shard}: a request was damaged {MAX_DAMAGED} times; the last time {why}."
                hint = " Check the network between the hosts, for example the offloads of a network card"
                call.work.fail(ConnectionLost(text + hint))

    def _send_again(self, shard: int, numbers: Iterable[int], why: str) -> None:
        """Sends unanswered requests again, on the same connection.

        Their replies do not land: the first reply to a request may be landing, or may have landed.
        """
        calls = self._requests.under_way(numbers)
        if calls:
            log.warning("shard %d: %s; sending %d requests again", shard, why, len(calls))
            for call in calls:
                self._send(call, None)
            self._flush(shard)

    def _drop(self, shard: int, lost: ConnectionLost) -> None:
        """Closes a broken connection and leaves reconnecting to the background thread."""
        if (connection := self._connections.pop(shard, None)) is None:
            return  # broke before, while another request was sent
        self._unwatch(connection)
        connection.close()
        self._broken.append((shard, lost))
        self._reconnect_bell.ring()

    def _unwatch(self, connection: Connection) -> None:
        self._poller.unregister(connection.waitable)
        del self._shard_at[connection.waitable]

    # The background thread.

    def _run(self) -> None:
        try:
            for shard in range(self._shards):
                try:
                    self._connect(shard)
                except ServerUnreachable as error:  # lost since the dial's path to it was found
                    self._reconnect(shard, ConnectionLost(str(error)))
            self.connected.complete_part()
            self._send_waiting()
            while not self._closing:
                sleep = SILENT_SECONDS if self._attending.locked() else self._requests.sleep_seconds(None)
                ready = dict(self._background_poller.poll(sleep))
                if self._is_left and not ready:  # no thread has waited for seconds
                    self._poll_in_background(True)
                if self._reconnect_bell.waitable in ready:
                    self._reconnect_bell.clear()
                while self._broken:
                    self._reconnect(*self._broken.popleft())
                while self._stuck:
                    shard = self._stuck.pop()
                    with contextlib.suppress(ServerUnreachable):  # a shard that is stopped answers later
                        self._connect(shard, self._connections.get(shard))
                if self._poller.fileno() in ready:
                    self._process(dict(self._poller.poll(0)))
                    if self._attending.locked():  # its reply may have been read just before it began to wait
                        self._bell.ring()
                elif not self._attending.locked():
                    self._process({})  # sends requests whose window has opened
        except Exception as error:
            self.fail(error)
        finally:
            with self._io_lock:
                for shard in list(self._connections):
                    self._connections.pop(shard).close()
                self._shard_at.clear()

    def _connect(self, shard: int, stuck: Connection | None = None) -> None:
        """Connects to a shard, in place of a stuck connection, and sends its unanswered requests again."""
        connection = self._dial(shard)
        with self._io_lock:
            if self._connections.get(shard) is not stuck:
                connection.close()  # the stuck one broke meanwhile
                return
            if stuck is not None:
                log.warning("shard %d: its connection is stuck; using a new one", shard)
                self._unwatch(stuck)
                stuck.close()
            self._connections[shard] = connection
            self._shard_at[connection.waitable] = shard
            self._poller.register(connection.waitable, select.EPOLLIN)
            for call in (unanswered := self._requests.unanswered(shard)):
                self._send(call, call.into)
            if unanswered:
                self._flush(shard)

    def _reconnect(self, shard: int, lost: ConnectionLost) -> None:
        """Reconnects to a shard, for at most `REDIAL_SECONDS`."""
        self._losses.note(shard, lost)
        log.warning("shard %d: %s; reconnecting", shard, lost)
        deadline = time.monotonic() + REDIAL_SECONDS
        while not self._closing:
            if self._requests.failure is not None:
                raise lost
            try:
                self._connect(shard)
                return
            except ServerUnreachable as error:
                if isinstance(error, ShardAwaited):
                    deadline = time.monotonic() + REDIAL_SECONDS
                if time.monotonic() > deadline:
                    text = f"shard {shard} is lost: {error}; gave up after {REDIAL_SECONDS:g} s of retries"
                    raise ServerUnreachable(f"{text}. {RESTART_ALL}") from lost
                time.sleep(0.05)

"""KVClient: a worker's line to every shard, served by one thread.

The training thread hands in requests and gets Work back; the I/O thread owns
the connections, sends, receives, and sends again when a connection broke. The
shards' ledgers make that safe: a push bears (sender, key, clock), and the same
one never counts twice.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ps.errors import ConfigError, ConnectionLost, Fenced, HubringError, JobFailed, ServerUnreachable
from ps.lookout import Lookout
from ps.messages import Code, Coded, Contribute, Init, Pull, Push, Refusal, Reply, Request, Result, Values
from ps.traffic import Traffic
from ps.transport import wire
from ps.transport.bundle import bytes_of
from ps.work import Work

if TYPE_CHECKING:
    from torch import Tensor

    from ps.transport.base import Connection, Message
    from ps.transport.registry import Dial
    from ps.types import Hyper, Sender

log = logging.getLogger(__name__)

Decode = Callable[[Coded], None]
"""Takes a mean that came in a codec; its payload may be read until it returns.

Raises:
    HubringError: It is in another codec than was due.
"""

REDIAL_SECONDS = 5.0
MAX_LOSSES = 10
"""Times that one line may break within `REDIAL_SECONDS`; after that dialling again does not help."""
_ERRORS: dict[Code, type[HubringError]] = {Code.FENCED: Fenced, Code.JOB_FAILED: JobFailed}


@dataclass(slots=True)
class _Call:
    """A request on its way, kept until its reply so that it can be sent again."""

    shard: int
    message: Message
    into: Tensor | None
    work: Work
    on_reply: Callable[[Reply], None] | None = None
    decode: Decode | None = None


class KVClient:
    """Push, pull and take part in rounds on a set of shards.

    Args:
        sender: Rank and incarnation, as the coordinator gave them.
        shards: How many shards there are.
        dial: Connects to one of them; called in the I/O thread, again after a loss.
    """

    def __init__(self, sender: Sender, shards: int, dial: Dial) -> None:
        self.sender = sender
        self.traffic = Traffic()
        self.draining = False
        """The hub asks to stop after this step. In lockstep modes every rank sees it in the same step."""
        self._dial = dial
        self._shards = shards
        self._clocks: dict[int, int] = {}
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count()
        self._outbox: deque[tuple[int, _Call]] = deque()
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._losses: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_LOSSES))
        """When each shard's line broke."""
        self._closing = False
        self._connected = Work("connecting to the shards")
        self._thread = threading.Thread(target=self._serve, name="kvclient", daemon=True)
        self._thread.start()

    def wait_connected(self, timeout: float) -> None:
        """Returns once every shard is connected.

        Raises:
            ServerUnreachable: A shard could not be reached by any transport.
        """
        self._connected.wait(timeout)

    # Requests. Tensors belong to the client until the work is done.

    def init(self, shard: int, key: int, values: Tensor, work: Work) -> None:
        """Gives a key its first values, unless it has some."""
        self._submit(shard, Init(self.sender, key, values), None, work)

    def push_pull(
        self,
        shard: int,
        key: int,
        gradient: Tensor | Coded,
        into: Tensor,
        hyper: Hyper,
        work: Work,
        decode: Decode | None = None,
    ) -> None:
        """Pushes a gradient; the parameters that may be read next land in `into` (flat, same numel).

        With `decode` the answer is due in a codec: its payload may land in `into`
        (flat uint8), and `decode` gets it in the I/O thread, before the work is done.
        """
        clock = self._clocks.get(key)
        if clock is None:
            raise HubringError(f"key {key} was pushed before it was ever pulled: its clock is unknown")
        push = Push(self.sender, key, clock, gradient, hyper)
        self._submit(shard, push, into, work, self._note_staleness, decode)

    def pull(self, shard: int, key: int, into: Tensor, work: Work, decode: Decode | None = None) -> None:
        """Brings a key's parameters into `into` (flat), and its clock; `decode` as in `push_pull`."""
        self._submit(shard, Pull(self.sender, key), into, work, decode=decode)

    def contribute(
        self, shard: int, request: Contribute, work: Work, on_result: Callable[[tuple[Tensor, ...]], None]
    ) -> None:
        """Takes part in a collective; `on_result` gets tensors that it must copy out of."""

        def on_reply(reply: Reply) -> None:
            if not isinstance(reply, Result):
                raise HubringError(f"shard {shard} answered a collective with {type(reply).__name__}")
            on_result(reply.tensors)

        self._submit(shard, request, None, work, on_reply)

    def _note_staleness(self, reply: Reply) -> None:
        if isinstance(reply, Values):
            self.traffic.staleness[reply.staleness] += 1

    def fail(self, error: BaseException) -> None:
        """Fails everything under way and everything still to come."""
        with self._lock:
            if self._failure is None:
                self._failure = error
            calls = [*self._calls.values(), *(call for _, call in self._outbox)]
            self._calls.clear()
            self._outbox.clear()
        self._connected.fail(error)
        for call in calls:
            call.work.fail(error)

    def close(self) -> None:
        """Ends the I/O thread and its connections; what is under way fails."""
        if not self._closing:
            self._closing = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)
            self.fail(ConnectionLost("the client was closed"))

    def _submit(
        self,
        shard: int,
        request: Request,
        into: Tensor | None,
        work: Work,
        on_reply: Callable[[Reply], None] | None = None,
        decode: Decode | None = None,
    ) -> None:
        number = next(self._numbers)
        call = _Call(shard, wire.encode_request(request, number), into, work, on_reply, decode)
        with self._lock:
            failure = self._failure
            if failure is None:
                if not self._outbox:
                    os.eventfd_write(self._wake, 1)
                self._outbox.append((number, call))
        if failure is not None:
            work.fail(failure)

    # The I/O thread.

    def _serve(self) -> None:
        connections: dict[int, Connection] = {}
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        lookout = Lookout(poller.poll)
        try:
            for shard in range(self._shards):
                connections[shard] = self._dial(shard)
                poller.register(connections[shard].waitable, select.POLLIN)
            self._connected.complete_part()
            while not self._closing:
                self._turn(lookout.wait(), connections, poller)
        except Exception as error:
            self.fail(error)
        finally:
            for connection in connections.values():
                connection.close()

    def _turn(self, ready: Collection[int], connections: dict[int, Connection], poller: select.poll) -> None:
        """Does what there is to do where something is ready."""
        if self._wake in ready:
            os.eventfd_read(self._wake)
            self._flush(connections, poller)
        for shard, connection in list(connections.items()):
            if connection.waitable in ready:
                self._receive(shard, connections, poller)

    def _flush(self, connections: dict[int, Connection], poller: select.poll) -> None:
        """Sends all that was handed in, then lets it out together."""
        shards = set()
        while (call := self._next_call()) is not None:
            shards.add(call.shard)
            try:
                self._send(connections[call.shard], call)
            except ConnectionLost as lost:
                self._reconnect(call.shard, connections, poller, lost)
        for shard in shards:
            try:
                connections[shard].flush()
            except ConnectionLost as lost:
                self._reconnect(shard, connections, poller, lost)

    def _next_call(self) -> _Call | None:
        with self._lock:
            if not self._outbox:
                return None
            number, call = self._outbox.popleft()
            self._calls[number] = call
            return call

    def _send(self, connection: Connection, call: _Call) -> None:
        into = None if call.into is None else bytes_of(call.into)
        connection.send(call.message, into)
        if call.message.payload is not None:
            self.traffic.bytes_sent += call.message.payload.nbytes

    def _receive(self, shard: int, connections: dict[int, Connection], poller: select.poll) -> None:
        try:
            for message in connections[shard].receive():
                self._answer(shard, message)
        except ConnectionLost as lost:
            self._reconnect(shard, connections, poller, lost)

    def _reconnect(
        self, shard: int, connections: dict[int, Connection], poller: select.poll, lost: ConnectionLost
    ) -> None:
        """Dials a shard again and repeats every request that it has not answered."""
        self._note_loss(shard, lost)
        log.warning("connection to shard %d lost (%s); dialling again", shard, lost)
        poller.unregister(connections[shard].waitable)
        connections.pop(shard).close()
        deadline = time.monotonic() + REDIAL_SECONDS
        while True:
            if self._closing or self._failure is not None:
                raise lost
            try:
                connection = self._dial(shard)
                connections[shard] = connection
                poller.register(connection.waitable, select.POLLIN)
                with self._lock:
                    unanswered = [call for _, call in sorted(self._calls.items()) if call.shard == shard]
                for call in unanswered:
                    self._send(connection, call)
                connection.flush()
                return
            except ServerUnreachable as error:
                stale = connections.pop(shard, None)
                if stale is not None:
                    poller.unregister(stale.waitable)
                    stale.close()
                if time.monotonic() > deadline:
                    raise ServerUnreachable(
                        f"shard {shard} is gone: {error}; tried again for {REDIAL_SECONDS:g} s"
                    ) from lost
                time.sleep(0.1)

    def _note_loss(self, shard: int, lost: ConnectionLost) -> None:
        """A line that can be dialled and breaks each time would otherwise be dialled without end."""
        losses = self._losses[shard]
        losses.append(time.monotonic())
        if len(losses) == MAX_LOSSES and losses[-1] - losses[0] < REDIAL_SECONDS:
            raise ConnectionLost(
                f"the line to shard {shard} broke {MAX_LOSSES} times within {REDIAL_SECONDS:g} s, the last"
                f" time as {lost}; dialling again does not help: see the log of the server"
            )

    def _answer(self, shard: int, message: Message) -> None:
        number, reply = wire.decode_reply(message)
        with self._lock:
            call = self._calls.pop(number, None)
        if call is None:
            return  # answered already: this is the second answer to a request sent twice
        if message.payload is not None:
            self.traffic.bytes_received += message.payload.nbytes
        try:
            self._settle(shard, call, reply)
        except Exception as error:  # whatever it is, somebody waits for this call
            call.work.fail(error)
        else:
            call.work.complete_part()

    def _settle(self, shard: int, call: _Call, reply: Reply) -> None:
        if isinstance(reply, Refusal):
            raise _ERRORS.get(reply.code, ConfigError)(f"shard {shard} refused: {reply.text}")
        if isinstance(reply, Values):
            self._clocks[reply.key] = reply.clock
            if reply.key == 0 and reply.drain:
                # Only key 0 decides: other keys may see the drain a round earlier or later.
                self.draining = True
            if call.into is not None:
                _take(reply.values, call.into, call.decode)
        if call.on_reply is not None:
            call.on_reply(reply)


def _take(values: Tensor | Coded | None, into: Tensor, decode: Decode | None) -> None:
    """Brings an answer to where it was due."""
    if isinstance(values, Coded) and decode is not None:
        decode(values)
    elif isinstance(values, Coded) or decode is not None:
        came = f"in {values.codec}" if isinstance(values, Coded) else "uncompressed"
        raise ConfigError(f"an answer came {came}: start the server and all workers from the same version")
    elif values is not None:
        into.copy_(values)

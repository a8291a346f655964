"""A server on a thread for the checks."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Self
from unittest.mock import patch

import zmq

from hubring.ps.core.bounds import Rejections
from hubring.ps.security.access import ShardKey
from hubring.ps.transport.base import Connection, Envelope, Listener, Transport
from hubring.ps.transport.polling import Bell
from tests.support.processes.stopwatch import until
from tests.support.transports.messages import PATIENCE, number_of, request
from tests.support.transports.relay import Relay

MakeTransport = Callable[[], Transport]
Answer = Callable[[Listener, Envelope], None]


def echo(listener: Listener, envelope: Envelope) -> None:
    """Answers with the request's header and payload."""
    listener.send(envelope.reply_to, envelope.message, stable=True)


def answers(payload: memoryview) -> Answer:
    """Answers each request with its number and this payload."""

    def answer(listener: Listener, envelope: Envelope) -> None:
        listener.send(envelope.reply_to, request(number_of(envelope.message), payload), stable=True)

    return answer


class NotesDamage:
    """An answer that notes what the listener says of each message's damage."""

    def __init__(self) -> None:
        self.damage: list[str] = []

    def __call__(self, listener: Listener, envelope: Envelope) -> None:
        self.damage.append(envelope.message.damage)
        listener.send(envelope.reply_to, request(7), stable=True)


class Serving:
    """A thread that opens a listener, polls it like a shard, and passes each request to `answer`."""

    def __init__(self, transport: Transport, answer: Answer = echo, place: str = "127.0.0.1") -> None:
        self._transport = transport
        self._answer = answer
        self._place = place
        self._bell = Bell()
        self._opened: Future[str] = Future()
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="serving")

    def __enter__(self) -> Self:
        self._thread.start()
        self.address = self._opened.result(PATIENCE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def line(self, *key: ShardKey) -> contextlib.closing[Connection]:
        """Returns a new connection to it, which a `with` closes. Args: see `dial`."""
        return contextlib.closing(self._transport.dial(self.address, PATIENCE, *key))

    @contextlib.contextmanager
    def behind(self, relay: Callable[[int], Relay]) -> Iterator[None]:
        """Puts a relay, made for the listener's port, between it and the lines that are opened meanwhile."""
        head, _, port = self.address.rpartition(":")
        with contextlib.closing(relay(int(port))) as via, patch.object(self, "address", f"{head}:{via.port}"):
            yield

    def stop(self) -> None:
        """Closes the listener; raises the thread's error."""
        self._bell.ring()
        self._thread.join(PATIENCE)
        self._ended.result(0)
        self._bell.close()

    def _run(self) -> None:
        try:
            listener = self._transport.listen(self._place)
            self._opened.set_result(listener.address)
            with contextlib.closing(listener):
                self._serve(listener)
            self._ended.set_result(None)
        except BaseException as error:
            self._ended.set_exception(error)

    def _serve(self, listener: Listener) -> None:
        poller = select.poll()
        poller.register(self._bell.waitable, select.POLLIN)
        poller.register(listener.waitable, select.POLLIN)
        while self._bell.waitable not in (ready := dict(poller.poll())):
            assert listener.waitable in ready
            for envelope in listener.receive():
                self._answer(listener, envelope)
            listener.flush()


@contextlib.contextmanager
def connected(make_transport: MakeTransport, answer: Answer = echo) -> Iterator[tuple[Transport, Connection]]:
    """Gives a transport, and a connection of it to a server that answers so."""
    transport = make_transport()
    with Serving(transport, answer) as server, server.line() as line:
        yield transport, line


@contextlib.contextmanager
def dealing(address: str, **options: object) -> Iterator[zmq.Socket[bytes]]:
    """Gives a DEALER with these options, connected to a listener, on which anything can be sent."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        for name, value in options.items():
            setattr(dealer, name, value)
        dealer.connect(address)
        yield dealer


def await_counts(rejections: Rejections, expected: dict[str, int]) -> None:
    """Waits until a listener has refused so much, by reason."""
    until(lambda: rejections.counts() == expected, rejections.counts)

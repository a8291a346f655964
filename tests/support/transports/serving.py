"""A server on a thread for the checks."""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import TracebackType

from hubring.ps.core.bounds import Rejections
from hubring.ps.transport.base import Connection, Envelope, Listener, Transport
from hubring.ps.transport.polling import Bell
from tests.support.processes.stopwatch import Stopwatch
from tests.support.transports.messages import PATIENCE

MakeTransport = Callable[[], Transport]
Answer = Callable[[Listener, Envelope], None]


def echo(listener: Listener, envelope: Envelope) -> None:
    """Answers with the request's header and payload."""
    listener.send(envelope.reply_to, envelope.message, stable=True)


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

    def __enter__(self) -> Serving:
        self._thread.start()
        self.address = self._opened.result(PATIENCE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

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
    with (
        Serving(transport, answer) as server,
        contextlib.closing(transport.dial(server.address, PATIENCE)) as line,
    ):
        yield transport, line


def await_counts(rejections: Rejections, expected: dict[str, int]) -> None:
    """Waits until a listener has refused so much, by reason."""
    watch = Stopwatch()
    while rejections.counts() != expected:
        assert watch.seconds < PATIENCE, rejections.counts()
        time.sleep(0.01)

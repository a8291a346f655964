"""A shard's end of ZeroMQ: one ROUTER for all its workers."""

from __future__ import annotations

import logging
from dataclasses import replace

import zmq

from hubring.ps.core.errors import ConfigError
from hubring.ps.transport.base import Envelope, Message, ReturnPath
from hubring.ps.transport.bell import Bell
from hubring.ps.transport.host import bracketed, numeric, reachable
from hubring.ps.transport.outbox import WINDOW, Outbox
from hubring.ps.transport.poller import poller
from hubring.ps.transport.zmq.socket import (
    FOR_REPLIES,
    LAST_WORDS_MS,
    SCHEME,
    Sockets,
    descriptor_of,
    has_message,
    message_of,
    put,
    receive,
    transmit,
)

log = logging.getLogger(__name__)

MOST_APART = 4096
"""Lines for replies that a listener knows, those of workers that have gone included."""


class ZmqListener:
    """A ROUTER, which reads from its workers in turn, one message of each.

    What it sends to a worker that is gone, it drops: that is ZeroMQ's default, and ours.
    """

    def __init__(self, sockets: Sockets, host: str) -> None:
        self._sockets = sockets
        here = numeric(host)
        self._ways_back: dict[bytes, bytes] = {}
        """Line for replies by line of requests, of workers that have them apart."""
        self._outboxes: dict[bytes, Outbox[Message]] = {}
        """By ZeroMQ's name for a worker's line, of those to which something is under way."""
        self._router = sockets.open(zmq.ROUTER, here)
        self._router.linger = LAST_WORDS_MS
        self._router.ipv6 = ":" in here
        self._bell = Bell()
        self._epoll = poller(descriptor_of(self._router), self._bell.waitable)
        self._waitable = self._epoll.fileno()
        try:
            self._router.bind(f"{SCHEME}{bracketed(here)}:*")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen on {host} by ZeroMQ ({error}); is it ours?") from error
        port = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self._address = f"{SCHEME}{bracketed(reachable(here))}:{port}"

    @property
    def address(self) -> str:
        return self._address

    @property
    def waitable(self) -> int:
        return self._waitable

    def receive(self) -> list[Envelope]:
        self._bell.clear()
        for line, outbox in list(self._outboxes.items()):
            transmit(outbox, self._router, line)
            if outbox.idle:
                del self._outboxes[line]
        envelopes = []
        for sender, *frames in receive(self._router):
            if len(frames) > 2:
                log.warning("dropped a message of %d parts: a request has one or two", len(frames))
            elif len(frames) == 1 and not frames[0]:
                self._answer_apart(sender.bytes)
            else:
                line = sender.bytes
                envelopes.append(Envelope(message_of(frames), self._ways_back.get(line, line)))
        self.flush()
        return envelopes

    def _answer_apart(self, line: bytes) -> None:
        """A line for replies is there; ZeroMQ does not tell when it has gone."""
        if len(self._ways_back) == MOST_APART:
            del self._ways_back[next(iter(self._ways_back))]  # who has it still is answered where it asks
        self._ways_back[line.removesuffix(FOR_REPLIES)] = line

    def send(self, reply_to: ReturnPath, message: Message, stable: bool) -> None:
        if message.payload is not None and not stable:
            message = replace(message, payload=memoryview(bytes(message.payload)))
        if reply_to not in self._outboxes:
            self._outboxes[reply_to] = Outbox(self._bell.ring, WINDOW)
        put(message, self._outboxes[reply_to])
        transmit(self._outboxes[reply_to], self._router, reply_to)

    def flush(self) -> None:
        if has_message(self._router):
            self._bell.ring()

    def close(self) -> None:
        if not self._router.closed:
            for line, outbox in self._outboxes.items():
                transmit(outbox, self._router, line, at_any_rate=True)
            self._epoll.close()
            self._bell.close()
            self._sockets.close(self._router)

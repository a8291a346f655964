"""A shard's end of the ZeroMQ transport: one ROUTER for all its workers.

It lets in clients that know its password, before ZeroMQ accepts a message of them. ZeroMQ asks this process
about each new connection over its own protocol, ZAP (https://rfc.zeromq.org/spec/27). The mechanism is PLAIN,
which shows a sniffer all. So the user name is a nonce, and the password made from the nonce and the
listener's secret: it opens one connection.

Law: only peers with the secret are admitted, since ZeroMQ limits no connection whose handshake has ended.
"""

from __future__ import annotations

import hmac
import itertools
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import zmq

from hubring.ps.core.bounds import Rejections
from hubring.ps.core.errors import ConfigError
from hubring.ps.security.access import NO_KEY_NEEDED, ShardKey, ShardLock
from hubring.ps.transport.base import DamagedHeader, Envelope, Message, ReturnPath
from hubring.ps.transport.host import bracketed, numeric, reachable
from hubring.ps.transport.outbox import WINDOW, Outbox
from hubring.ps.transport.polling import Bell, poller
from hubring.ps.transport.zmq.newcomers import Newcomers
from hubring.ps.transport.zmq.socket import (
    FOR_REPLIES,
    LINGER_MS,
    MAX_FIRST_PART,
    MAX_PARTS,
    NOW,
    NOW_AND_MORE,
    PROOF,
    QUESTION,
    SCHEME,
    UNIX,
    Seal,
    Sockets,
    descriptor_of,
    has_message,
    message_of,
    put,
    receive,
    transmit,
)

log = logging.getLogger(__name__)

MAX_REPLY_ROUTES = 4096
"""Maximum number of reply connections to remember, including those of workers that have gone."""


class ZmqListener:
    """A ROUTER, which reads from its workers in turn, one message each.

    ZeroMQ drops messages to a worker that is gone, as a Listener must.

    Args:
        place: The address to listen on, or the path of a unix socket, to which only members must come.
        rejections: Counts dropped messages and refused connections.
        lock: Which peers to admit; None: all.
    """

    def __init__(self, place: str, rejections: Rejections, lock: ShardLock | None) -> None:
        self._sockets = Sockets()  # of its own, as the context's ZAP questions go to one listener
        self._rejections = rejections
        self._unix = Path(place) if place.startswith("/") else None
        here = place if self._unix else numeric(place)
        self._reply_routes: dict[bytes, bytes] = {}
        """For workers with a separate reply connection: its routing id, by that of the request connection."""
        self._key = NO_KEY_NEEDED if lock is None else lock.key
        self._seals: dict[bytes, Seal] = {}
        """With a key for data, what seals the messages of each lane, by its routing id.

        Only lanes that have sent a message with the key have a place. None is forgotten, because its
        requests could then be sent again. There are at most MOST_PASSWORDS.
        """
        self._numbers = itertools.count()
        self._outboxes: dict[bytes, Outbox[Message]] = {}
        """Outboxes by routing id, for connections with bytes in flight."""
        self._router = self._sockets.open(zmq.ROUTER, here)
        self._router.linger = LINGER_MS
        self._router.ipv6 = ":" in here
        self._handshakes: Handshakes | None = None
        self._newcomers: Newcomers | None = None
        if lock is not None:
            self._handshakes = Handshakes(self._sockets, self._router, lock.key, rejections)
        self._bell = Bell()
        asked = [] if self._handshakes is None else [self._handshakes.descriptor]
        self._epoll = poller(descriptor_of(self._router), self._bell.waitable, *asked)
        self.waitable = self._epoll.fileno()
        try:
            self._router.bind(f"{UNIX}{place}" if self._unix else f"{SCHEME}{bracketed(here)}:*")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"cannot listen on {place} with ZeroMQ ({error}); use an address of this host"
            ) from error
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        if self._unix:
            return
        port = self.address.rpartition(":")[2]
        self._newcomers = Newcomers(self._router, int(port), rejections)
        self.address = f"{SCHEME}{bracketed(reachable(here))}:{port}"

    def receive(self) -> list[Envelope]:
        self._bell.clear()
        if self._handshakes is not None:
            self._handshakes.answer()
        for route, outbox in list(self._outboxes.items()):
            transmit(outbox, self._router, route, self._seal(route))
            if outbox.idle:
                del self._outboxes[route]
        envelopes = []
        for sender, *frames in receive(self._router):
            if len(frames) >= MAX_PARTS:
                text = f"dropped a ZeroMQ message of more than {MAX_PARTS - 1} parts"
                self._rejections.add("parts", log, text)
            elif len(frames[0]) > MAX_FIRST_PART:
                text = f"dropped a ZeroMQ message with a header of {len(frames[0])} bytes; the maximum is"
                self._rejections.add("header", log, f"{text} {MAX_FIRST_PART}")
            elif len(frames) == 1 and frames[0].bytes == QUESTION:
                self._router.send(sender.bytes, NOW_AND_MORE)
                self._router.send(self._seal(sender.bytes).seal(PROOF)[0], NOW)
            else:
                route = sender.bytes
                seal = self._seal(route)
                message = _message(frames, seal)
                if self._key.data_key and not message.damage:  # its requests may not count again
                    self._seals[route] = seal
                if message == PROOF:
                    self._add_reply_route(route)
                else:
                    envelopes.append(Envelope(message, self._reply_routes.get(route, route)))
        self.flush()
        return envelopes

    def _add_reply_route(self, route: bytes) -> None:
        """Records a reply connection. ZeroMQ does not report when it has gone."""
        if len(self._reply_routes) == MAX_REPLY_ROUTES:
            del self._reply_routes[next(iter(self._reply_routes))]  # its replies use the request connection
        self._reply_routes[route.removesuffix(FOR_REPLIES)] = route

    def _seal(self, route: bytes) -> Seal:
        """Returns what seals the messages of the lane with this routing id."""
        if seal := self._seals.get(route):
            return seal
        return seal_of(self._key, route, self._numbers, serves=True, checked=self._unix is None)

    def send(self, reply_to: ReturnPath, message: Message, stable: bool) -> None:
        if message.payload is not None and not stable:
            message = replace(message, payload=memoryview(bytes(message.payload)))
        if reply_to not in self._outboxes:
            self._outboxes[reply_to] = Outbox(self._bell.ring, WINDOW)
        put(message, self._outboxes[reply_to])
        transmit(self._outboxes[reply_to], self._router, reply_to, self._seal(reply_to))

    def flush(self) -> None:
        if has_message(self._router):
            self._bell.ring()

    def close(self) -> None:
        if not self._router.closed:
            for route, outbox in self._outboxes.items():
                transmit(outbox, self._router, route, self._seal(route), force=True)
            self._epoll.close()
            self._bell.close()
            if self._newcomers is not None:
                self._newcomers.close()
            if self._handshakes is not None:
                self._handshakes.close()
            self._sockets.close(self._router)
            if self._unix:
                self._unix.unlink(missing_ok=True)


def seal_of(key: ShardKey, lane: bytes, numbers: Iterator[int], *, serves: bool, checked: bool) -> Seal:
    """Returns what seals the messages of one end of a lane: a `KeyedSeal` if there is a key for data."""
    if not key.data_key:
        return Seal(checked)
    from hubring.ps.transport.zmq.keyed_seal import KeyedSeal  # cryptography takes long to import

    return KeyedSeal(key, lane, numbers, serves=serves)


def _message(frames: list[zmq.Frame], seal: Seal) -> Message:
    try:
        return message_of(frames, seal)
    except DamagedHeader as error:
        peer = "an unknown address"
        with suppress(zmq.ZMQError):  # ZeroMQ does not know it for every message of a peer that has gone
            peer = str(frames[0].get("Peer-Address"))
        return Message(b"", damage=f"{error}; it came from {peer}")


MOST_PASSWORDS = 131_072
"""Maximum number of passwords of a shard's lifetime; it lets in no further connection.

None is forgotten, because a sniffer could then use it again. A worker has one or two connections.
"""

FULL = 500
"""ZAP's status code for a connection beyond that."""

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_ALLOWED, _REFUSED = 200, 400


class Handshakes:
    """Answers ZeroMQ's questions about new connections to one ROUTER.

    Args:
        sockets: Those of the ROUTER; no other listener may use them.
        router: Asks for the password from now on.
        key: Whose passwords a worker must show.
        rejections: Counts connections without it.
    """

    def __init__(
        self, sockets: Sockets, router: zmq.Socket[bytes], key: ShardKey, rejections: Rejections
    ) -> None:
        self._sockets = sockets
        self._key = key
        self._used: set[bytes] = set()
        self._rejections = rejections
        self._questions = sockets.open(zmq.REP, "")
        self._questions.bind(_ENDPOINT)
        router.plain_server = True

    @property
    def descriptor(self) -> int:
        """Readable, edge-triggered, if `answer` has something to do."""
        return descriptor_of(self._questions)

    def answer(self) -> None:
        """Answers all waiting questions. Never blocks."""
        while has_message(self._questions):
            _, number, _, peer, _, _, *credentials = self._questions.recv_multipart(NOW)
            code, why = self._verdict(credentials)
            if code != _ALLOWED:
                self._rejections.add("token", log, f"refused a ZeroMQ connection of {peer.decode()}: {why}")
            self._questions.send_multipart([_VERSION, number, b"%d" % code, why.encode(), b"", b""], NOW)

    def _verdict(self, credentials: list[bytes]) -> tuple[int, str]:
        """Returns ZAP's status code for a nonce and a password, and its reason."""
        nonce, password = credentials
        if not hmac.compare_digest(password, self._key.password(nonce)):
            return _REFUSED, "its token is not this shard's"
        if nonce in self._used:
            return _REFUSED, "its password was used before"
        if len(self._used) >= MOST_PASSWORDS:
            return FULL, f"this shard has let in {MOST_PASSWORDS} before"
        self._used.add(nonce)
        return _ALLOWED, ""

    def close(self) -> None:
        self._sockets.close(self._questions)

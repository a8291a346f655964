"""Lets in clients that know the listener's password, before ZeroMQ accepts a message of them.

ZeroMQ asks this process about each new connection over its own protocol, ZAP (https://rfc.zeromq.org/spec/27).
The mechanism is PLAIN, which shows a sniffer all. So the user name is a nonce, and the password made from the
nonce and the listener's secret: it opens one connection. With CURVE a client proves by its knowledge of the
listener's public key, which only admitted workers get, that it may connect.

Law: only peers with the secret are admitted, since ZeroMQ limits no connection whose handshake has ended.
"""

from __future__ import annotations

import hmac
import logging
import secrets

import zmq

from hubring.ps.core.bounds import Rejections
from hubring.ps.security.shard_key import ShardKey
from hubring.ps.transport.zmq.socket import NOW, Sockets, descriptor_of, has_message

log = logging.getLogger(__name__)

MOST_PASSWORDS = 131_072
"""Maximum number of passwords of a shard's lifetime; it lets in no further connection.

None is forgotten, because a sniffer could then use it again. A worker has one or two connections.
"""

FULL = 500
"""ZAP's status code for a connection beyond that."""

_NONCE_BYTES = 16

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_ALLOWED, _REFUSED = 200, 400


def show(dealer: zmq.Socket[bytes], key: ShardKey) -> None:
    """Makes a worker's socket show a new password when it connects, which it can do once."""
    nonce = secrets.token_hex(_NONCE_BYTES).encode()
    dealer.plain_username, dealer.plain_password = nonce, key.password(nonce)


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

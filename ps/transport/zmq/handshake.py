"""Lets in clients that know the listener's password, before ZeroMQ accepts a message of them.

ZeroMQ asks this process about each new connection over its own protocol, ZAP (https://rfc.zeromq.org/spec/27).
The mechanism is PLAIN: it shows the password to a sniffer, who can then connect. The seal of each message
(`keyed_seal`) keeps the sniffer from more, because the password does not tell its key. With CURVE a client
proves by its knowledge of the listener's public key, which only admitted workers get, that it may connect.
"""

from __future__ import annotations

import hmac
import logging

import zmq

from hubring.ps.core.rejections import Rejections
from hubring.ps.transport.zmq.socket import NOW, Sockets, descriptor_of, has_message

log = logging.getLogger(__name__)

USER = b"member"
"""The user name of every worker."""

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


def show(dealer: zmq.Socket[bytes], password: str) -> None:
    """Makes a worker's socket show a password when it connects."""
    dealer.plain_username, dealer.plain_password = USER, password.encode()


class Handshakes:
    """Answers ZeroMQ's questions about new connections to one ROUTER.

    Args:
        sockets: Those of the ROUTER; no other listener may use them.
        router: Asks for the password from now on.
        password: What a worker must show.
        rejections: Counts connections without it.
    """

    def __init__(
        self, sockets: Sockets, router: zmq.Socket[bytes], password: str, rejections: Rejections
    ) -> None:
        self._sockets = sockets
        self._password = password.encode()
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
            allowed = credentials[0] == USER and hmac.compare_digest(credentials[1], self._password)
            if not allowed:
                text = f"refused a ZeroMQ connection of {peer.decode()}: its token is not this shard's"
                self._rejections.add("token", log, text)
            verdict = (b"200", b"OK") if allowed else (b"400", b"wrong token")
            self._questions.send_multipart([_VERSION, number, *verdict, USER, b""], NOW)

    def close(self) -> None:
        self._sockets.close(self._questions)

"""Messages between the conductor and its followers, and the connection that carries them.

A process that ends closes its connections. A machine that vanishes does not, so the kernel probes it when
the connection is idle (TCP keepalive).
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from msgspec import DecodeError, Struct

from hubring.ps.core.errors import HubringError
from hubring.workers.compare.run.noise import ProcessCounts


class Hello(Struct, frozen=True, kw_only=True, tag=True):
    """A follower's first message."""

    rank: int
    size: int
    local_rank: int
    host: str
    """Hostname of its machine or container."""
    boot: str
    """Equal for all tasks on one machine: the kernel's boot id, else the hostname."""
    address: str
    """Its address for the other machines."""
    cores: tuple[int, ...]
    """Numbers of the cores that it can use."""
    machine: dict[str, Any]
    """Result of `hubring.workers.peers.machine.describe`."""


class StartRequest(Struct, frozen=True, kw_only=True, tag="Start"):
    """Start a program."""

    name: str
    command: tuple[str, ...]
    directory: str
    """Folder for its output, visible to all machines."""
    threads: int
    """PyTorch threads."""


class Stop(Struct, frozen=True, kw_only=True, tag=True):
    """Send SIGTERM to a program."""

    name: str


class Kill(Struct, frozen=True, kw_only=True, tag=True):
    """Kill a program and all that it started."""

    name: str


class Listen(Struct, frozen=True, tag=True):
    """A run begins: measure noise."""


class Tell(Struct, frozen=True, tag=True):
    """The run is over: send the noise counts."""


class AskTime(Struct, frozen=True, tag=True):
    """Send the time of your clock."""


class Over(Struct, frozen=True, kw_only=True, tag=True):
    """The comparison has ended."""

    code: int
    """Exit code of the conductor. All tasks exit with it, because launchers restart failed tasks."""


class Ended(Struct, frozen=True, kw_only=True, tag=True):
    """A program has ended."""

    name: str
    code: int
    """Negative for a signal."""


class Counted(Struct, frozen=True, kw_only=True, tag=True):
    """The answer to `Tell`."""

    sample: ProcessCounts


class Time(Struct, frozen=True, kw_only=True, tag=True):
    """The answer to `AskTime`."""

    ns: int
    """Nanoseconds since 1970."""


class Failed(Struct, frozen=True, kw_only=True, tag=True):
    """The follower cannot start a program; `Ended` for that program follows."""

    why: str


Order = StartRequest | Stop | Kill | Listen | Tell | AskTime | Over
Report = Hello | Ended | Counted | Time | Failed
Message = Order | Report

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Message).decode


FRAME_SECONDS = 20
"""Limit of a frame that has begun, and of each of the two proofs."""
_PROOF_BYTES = 32
"""Bytes of a challenge and of its answer."""
_HASH = "sha256"
"""Hash of the proofs. multiprocessing's own challenge uses MD5 before Python 3.12, which FIPS forbids."""
_IDLE, _BETWEEN, _TIMES = 5, 5, 3
"""Keepalive: seconds of silence before the first probe, seconds between probes, unanswered probes."""


class OtherEndLost(HubringError):
    """The other end is lost; the message says how that was noticed."""


class TaskConnection:
    """One end of the connection; owns the socket.

    Args:
        end: A connected TCP socket.
    """

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(None)
        limit = struct.pack("ll", FRAME_SECONDS, 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, _IDLE),
            (socket.TCP_KEEPINTVL, _BETWEEN),
            (socket.TCP_KEEPCNT, _TIMES),
            (socket.TCP_USER_TIMEOUT, 1000 * (_IDLE + _BETWEEN * _TIMES)),
            (socket.TCP_NODELAY, 1),
        ):
            end.setsockopt(socket.IPPROTO_TCP, option, value)
        self._end, self._connection = end, Connection(end.dup().detach())

    def prove(self, key: bytes, *, first: bool) -> None:
        """Verifies that both ends hold the key, without sending it.

        Each end answers the other's random challenge with its HMAC (RFC 2104). The turn is part of what is
        signed, so that an end's answer cannot be replayed to it.

        Args:
            key: The same on both ends.
            first: This end sends its challenge first.

        Raises:
            OtherEndLost: The other end does not hold the key or does not answer; the connection is closed.
        """
        try:
            begin, end = (self._ask, self._answer) if first else (self._answer, self._ask)
            begin(key, b"first")
            end(key, b"second")
        except (OSError, EOFError) as cause:
            self.close()
            why = str(cause) or "it closed the connection, so it has another key or too many connections"
            raise OtherEndLost(f"the other end did not prove itself: {why}") from cause

    def _ask(self, key: bytes, turn: bytes) -> None:
        challenge = secrets.token_bytes(_PROOF_BYTES)
        self._connection.send_bytes(challenge)
        proof = self._connection.recv_bytes(_PROOF_BYTES)
        if not hmac.compare_digest(proof, hmac.digest(key, turn + challenge, _HASH)):
            raise ConnectionRefusedError("it does not hold the key of this comparison")

    def _answer(self, key: bytes, turn: bytes) -> None:
        challenge = self._connection.recv_bytes(_PROOF_BYTES)
        self._connection.send_bytes(hmac.digest(key, turn + challenge, _HASH))

    def send(self, message: Message) -> None:
        """Sends one message.

        Raises:
            OtherEndLost: The other end is lost.
        """
        try:
            self._connection.send_bytes(encode(message))
        except OSError as cause:
            raise OtherEndLost(str(cause)) from cause

    def receive(self, timeout: float) -> Message | None:
        """Returns the next message; None if none arrives within `timeout` seconds.

        Raises:
            OtherEndLost: The other end is lost.
        """
        try:
            if not self._connection.poll(timeout):
                return None
            message: Message = decode(self._connection.recv_bytes())
        except (OSError, EOFError) as cause:
            raise OtherEndLost(
                "the connection was closed" if isinstance(cause, EOFError) else str(cause)
            ) from cause
        except DecodeError as cause:
            raise OtherEndLost(
                f"invalid message ({cause}); install the same version on all machines"
            ) from cause
        return message

    def hang_up(self) -> None:
        """Ends a call of another thread, which then closes the connection."""
        with contextlib.suppress(OSError):  # it is closed already
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()
        self._end.close()

"""How the members of a group find out whether they are on one host, and connect there.

Each member listens at a unix socket in the abstract namespace, with a random name that the others learn from
it. Members that cannot reach a socket are on another host, or belong to another user.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from hubring.ps.core.errors import HubringError, RingBroken
from hubring.ps.core.work import Work
from hubring.ps.transport import mapping
from hubring.ps.transport.shm.packet import peer_user
from hubring.workers.communicators.base import Communicator, transfer_call
from hubring.workers.communicators.host.marks import MARK_BYTES, Peer
from hubring.workers.communicators.host.shared_memory import LOOK_SECONDS, SLOT, SLOTS, HostExchange

CONNECT_SECONDS = 60.0
SECRET_BYTES = 16
TOGETHER, APART = b"y", b"n"

GATHERS = 2
"""How often `connect` gathers."""
_RANK_BYTES = 4

Gather = Callable[[bytes], Sequence[bytes]]
"""Returns what all members pass, by rank in the group; empty bytes for one that is not there. All pass
equally many bytes."""


class Watch:
    """Learns from the hub that other members are lost.

    Args:
        communicator: Connects this process to the job.
        name: The group's name, the same for all members.
        own: This process's rank in the job.
        others: The other members' ranks in the job.
    """

    def __init__(self, communicator: Communicator, name: str, own: int, others: Sequence[int]) -> None:
        self._communicator = communicator
        # Members of a ring notice a loss themselves.
        watched = others if communicator.topology == "hub" else ()
        self._calls = [transfer_call(f"{name} watch", one, own) for one in watched]
        self._works: list[Work] = []

    def lost(self) -> HubringError | None:
        """Returns the error if one of them is lost. The first call begins to watch."""
        if not self._works:
            self._works = [self._communicator.collective(call) for call in self._calls]
        for call, work in zip(self._calls, self._works, strict=True):
            if work.error is not None:
                return RingBroken(f"rank {call.root} is lost, or has left the job: {work.error}")
        return None


def row_of(rank: int, given: bytes) -> Tensor:
    """Returns a rank and what it passes as a row, for a hub's allgather of equal rows."""
    return torch.frombuffer(bytearray(rank.to_bytes(_RANK_BYTES) + given), dtype=torch.uint8)[None]


def by_rank(rows: Tensor) -> dict[int, bytes]:
    """Returns what each rank passes, from the rows of all that are there."""
    return {int.from_bytes(row[:_RANK_BYTES]): row[_RANK_BYTES:] for row in map(bytes, rows.numpy())}


def connect(
    gather: Gather,
    name: str,
    ranks: Sequence[int],
    own: int,
    lost: Callable[[], HubringError | None] = lambda: None,
    seconds: float = CONNECT_SECONDS,
) -> HostExchange | None:
    """Connects all members if they are on one host. All members call it together.

    Args:
        gather: Connects the members already.
        name: The group's name, for errors.
        ranks: What errors call the members.
        own: This member's rank in the group.
        lost: See `HostExchange`.
        seconds: How long another member may take for one step.

    Returns:
        None on all members if one cannot reach another one.

    Raises:
        RingBroken: A member is lost.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    dialled: dict[int, socket.socket] = {}
    peers: dict[int, Peer] = {}
    opened = ExitStack()
    try:
        try:
            descriptor, listener = _listen(opened, secret, len(ranks), seconds)
            reached = TOGETHER
        except OSError:  # a sandbox forbids it, or too many files are open
            reached = APART
        secrets_of_all = gather(secret)
        if not all(secrets_of_all):
            reached = APART
        try:
            for member in range(own + 1, len(ranks)) if reached == TOGETHER else ():
                dialled[member] = _dial(secrets_of_all[member], own, descriptor, seconds)
        except OSError:
            reached = APART
        if set(gather(reached)) != {TOGETHER}:
            return None
        for _ in range(own):
            member, connection, memory = _accept(listener, secret, seconds)
            socket.send_fds(connection, [own.to_bytes(4)], [descriptor])
            peers[member] = _peer(ranks[member], connection, memory)
        listener.close()
        for member in list(dialled):
            memory = _receive_memory(dialled[member])
            peers[member] = _peer(ranks[member], dialled.pop(member), memory)
        own_memory = _map(os.dup(descriptor))
        connected = HostExchange(name, own, own_memory, dict(sorted(peers.items())), lost)
        peers = {}
        return connected
    except (OSError, EOFError) as cause:
        raise RingBroken(f"a member of {name} was lost while the members connected: {cause}") from cause
    finally:
        opened.close()
        for unused in (*dialled.values(), *(peer.socket for peer in peers.values())):
            unused.close()


def _address(secret: bytes) -> bytes:
    return b"\0hubring-" + secret.hex().encode()


def _listen(opened: ExitStack, secret: bytes, members: int, seconds: float) -> tuple[int, socket.socket]:
    """Returns this member's memory, and the socket at which it listens."""
    descriptor = os.memfd_create("hubring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    opened.callback(os.close, descriptor)
    os.ftruncate(descriptor, SLOT * SLOTS)
    mapping.seal(descriptor)
    listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    listener.bind(_address(secret))
    listener.listen(members)
    listener.settimeout(seconds)
    return descriptor, listener


def _dial(secret: bytes, own: int, descriptor: int, seconds: float) -> socket.socket:
    """Connects to a member, and sends it this member's rank and memory."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(seconds)
        connection.connect(_address(secret))
        if peer_user(connection) != os.getuid():
            raise PermissionError("the listener is another user's")
        socket.send_fds(connection, [secret, own.to_bytes(4)], [descriptor])
    except OSError:
        connection.close()
        raise
    return connection


def _accept(listener: socket.socket, secret: bytes, seconds: float) -> tuple[int, socket.socket, Tensor]:
    """Returns a member that connected, its socket and its memory. Ignores strangers."""
    while True:
        connection, _ = listener.accept()
        connection.settimeout(seconds)
        if peer_user(connection) == os.getuid():
            hello, descriptors, _, _ = socket.recv_fds(connection, len(secret) + 4, 1)
            if hello[:-4] == secret and descriptors:
                return int.from_bytes(hello[-4:]), connection, _map(descriptors[0])
        connection.close()


def _receive_memory(connection: socket.socket) -> Tensor:
    _, descriptors, _, _ = socket.recv_fds(connection, 4, 1)
    if not descriptors:
        raise EOFError("a connection was closed")
    return _map(descriptors[0])


def _peer(rank: int, connection: socket.socket, memory: Tensor) -> Peer:
    connection.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, int(LOOK_SECONDS * 1e6)))
    return Peer(f"rank {rank}", connection, memory, bytearray(MARK_BYTES))


def _map(descriptor: int) -> Tensor:
    return torch.frombuffer(mapping.attach(descriptor), dtype=torch.uint8)

"""What members on one host send each other through sockets."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

import torch
from torch import Tensor

SMALL = 1 << 16
"""The most bytes that a mark carries."""
MARK = struct.Struct("<4s4xQQQQ24x")
"""Operation, its number, the bytes that the member offers, and where the receiver's part is."""
FAILED = b"fail"
"""The operation of a mark that tells why its sender has failed."""
MARK_BYTES = MARK.size + SMALL
"""The size of the largest mark."""


class HostMark(NamedTuple):
    """What a member sent.

    Attributes:
        total: Bytes that it offers to all.
        start: Where the receiver's part of them begins.
        stop: Where it ends.
        carried: The part, if the total is small; valid until the next mark.
    """

    total: int
    start: int
    stop: int
    carried: memoryview


def tensor_over(data: memoryview | bytearray, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Returns bytes as a flat tensor in the same memory."""
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")


class Peer(NamedTuple):
    """Another member.

    Attributes:
        name: What errors call it.
        socket: Connected to it; of kind SOCK_SEQPACKET. Its calls return after `LOOK_SECONDS`.
        memory: Its memory.
        received: Room for a mark.
    """

    name: str
    socket: socket.socket
    memory: Tensor
    received: bytearray


_NAMES = {
    b"rdce": "a reduction of few bytes",
    b"RDCE": "a reduction",
    b"brdc": "a broadcast",
    b"gthr": "a gather of all",
    b"a2a ": "an exchange of parts",
    b"each": "a gather of unlike sizes",
}


def spell(what: bytes) -> str:
    """Returns an operation in words."""
    return _NAMES.get(what, "a move")

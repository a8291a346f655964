"""The TCP connections of a Gloo group, and how to cut them.

Gloo has no call that ends a pending operation, and it ends one within milliseconds if its connection closes.
So a group that must end has its sockets shut down, here and thereby on the other members. A socket belongs
to the group if one of its ends is the listener of a member's device.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from hubring.ps.core.errors import RingBroken

ATTEMPTS = 10
"""How often a device is made until no other thread opens a listener meanwhile."""

Address = tuple[Any, ...]

_opening = threading.Lock()
"""Held while a device is made, so that its port can be told from those of other rings."""


class GroupConnections:
    """The connections of one member.

    Args:
        host: This member's address for the others.

    Attributes:
        device: Gloo's device, for the group's options.
    """

    def __init__(self, host: str) -> None:
        self._own, self.device = _listening_device(host)
        self._others: set[Address] = set()

    def introduce(self, store: Store, rank: int, size: int) -> None:
        """Exchanges the listeners' addresses with the other members, before the group connects."""
        host, port = self._own[:2]
        store.set(f"listener/{rank}", f"{host} {port}")
        for other in range(size):
            name, number = store.get(f"listener/{other}").decode().split()
            if other != rank:
                self._others.add((name, int(number)))

    def cut(self) -> None:
        """Shuts all connections down. Pending and later operations of the group then fail on all members."""
        for one in _sockets():
            with closing(one), suppress(OSError):
                peer = one.getpeername()[:2]  # the listener has none; Gloo would end the process without it
                if one.getsockname()[:2] == self._own[:2] or peer in self._others:
                    one.shutdown(socket.SHUT_RDWR)


def _listening_device(host: str) -> tuple[Address, Any]:
    own = {place[0] for *_, place in socket.getaddrinfo(host, None)}
    for _ in range(ATTEMPTS):
        with _opening:
            before = set(_listeners())
            device = dist.ProcessGroupGloo.create_device(hostname=host)
            made = [one for one in set(_listeners()) - before if one[0] in own]
        if len(made) == 1:
            return made[0], device
    raise RingBroken(f"cannot find the port on which Gloo listens at {host}; other threads open ports")


def _listeners() -> Iterator[Address]:
    for one in _sockets():
        with closing(one):
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield one.getsockname()


def _sockets() -> Iterator[socket.socket]:
    """Yields a duplicate of each TCP socket of this process."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                one = socket.socket(fileno=os.dup(int(name)))
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    yield one
                else:
                    one.close()

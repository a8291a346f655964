"""Ports for programs that must know them before they start."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Returns a port of loopback on which nothing listens.

    It is below those that the system gives out by itself, so that nothing else gets it meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:  # taken
            continue
        return port

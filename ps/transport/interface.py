"""This host's network interfaces, and their addresses."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
"""Linux's request for an interface's address (netdevice(7))."""


def addresses() -> dict[str, str]:
    """Each interface's IPv4 address by its name; empty where it has none."""
    return {name: _address(name) for _, name in socket.if_nameindex()}


def _address(name: str) -> str:
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
        except OSError:  # it has none
            return ""
    return socket.inet_ntoa(answer[20:24])

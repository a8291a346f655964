"""This host's network interfaces, and their addresses."""

from __future__ import annotations

import socket


def addresses() -> dict[str, str]:
    """Each interface's IPv4 address by its name; empty where it has none."""
    import psutil  # takes some 20 ms to load

    known = psutil.net_if_addrs()  # which leaves out an interface that has no address of any kind
    return {
        name: next((each.address for each in known.get(name, ()) if each.family == socket.AF_INET), "")
        for _, name in socket.if_nameindex()
    }

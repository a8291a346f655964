"""Which network interface has an address: libraries want its name."""

from __future__ import annotations

import fcntl
import socket
import struct

from ps.config import export
from ps.errors import ConfigError

_SIOCGIFADDR = 0x8915
"""Linux's request for an interface's address (netdevice(7))."""

_ASKED = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include")
"""Where Gloo, NCCL, TensorPipe and Open MPI look for a name."""


def talk_through(address: str) -> None:
    """Lets libraries that begin later talk through the interface with this address alone; raises as it."""
    export(dict.fromkeys(_ASKED, interface(address)))


def interface(address: str) -> str:
    """The name of this host's interface that has the IPv4 address.

    Raises:
        ConfigError: None has it.
    """
    found = {name: _address(name) for _, name in socket.if_nameindex()}
    for name, own in found.items():
        if own == address:
            return name
    shown = ", ".join(f"{name} {own}" for name, own in found.items() if own)
    raise ConfigError(f"--host {address}: no interface here has that address; there are {shown}")


def _address(name: str) -> str:
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
        except OSError:  # it has none
            return ""
    return socket.inet_ntoa(answer[20:24])

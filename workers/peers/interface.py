"""Which network interface has an address: libraries want its name."""

from __future__ import annotations

from hubring.ps.config.environment import export
from hubring.ps.core.errors import ConfigError
from hubring.ps.transport.network_interfaces import addresses

_ASKED = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include")
"""Where Gloo, NCCL, TensorPipe and Open MPI look for a name."""


def talk_through(address: str | None) -> None:
    """Lets libraries that begin later talk through the interface with this address alone; None: any.

    Raises as `interface`.
    """
    if address is not None:
        export(dict.fromkeys(_ASKED, interface(address)))


def interface(address: str) -> str:
    """The name of this host's interface that has the IPv4 address.

    Raises:
        ConfigError: None has it.
    """
    found = addresses()
    for name, own in found.items():
        if own == address:
            return name
    shown = ", ".join(f"{name} {own}" for name, own in found.items() if own)
    raise ConfigError(f"--host {address}: no interface here has that address; there are {shown}")

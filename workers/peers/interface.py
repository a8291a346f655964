"""Finds the network interface of an address, since libraries need the interface's name."""

from __future__ import annotations

from hubring.ps.config.environment import export
from hubring.ps.core.errors import ConfigError
from hubring.ps.transport.network_interfaces import addresses

_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include")
"""The variables from which Gloo, TensorPipe and Open MPI read the name.

NCCL is not among them: our ring leaves the choice to NCCL_SOCKET_IFNAME or NCCL, and so must peers.
"""


def talk_through(address: str | None) -> None:
    """Restricts libraries that start later to the interface with this address; None: no restriction.

    Raises:
        ConfigError: No interface of this host has the address.
    """
    if address is not None:
        export(dict.fromkeys(_VARIABLES, interface(address)))


def interface(address: str) -> str:
    """Returns the name of this host's interface with the IPv4 address.

    Raises:
        ConfigError: No interface of this host has the address.
    """
    found = addresses()
    for name, own in found.items():
        if own == address:
            return name
    shown = ", ".join(f"{name} {own}" for name, own in found.items() if own)
    raise ConfigError(f"--host {address}: no interface has that address; expected one of {shown}")

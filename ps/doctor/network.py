"""This machine's network: host names, interfaces, and a server's ports."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hubring.ps.config.server import ServerConfig
from hubring.ps.config.values import is_loopback
from hubring.ps.core.errors import ConfigError, ServerUnreachable
from hubring.ps.doctor.check import LOOPBACK, Finding, Subject, failure, ok, warning
from hubring.ps.transport.host import bracketed, interface_addresses, numeric, reachable, refusal

OWN_NAME, INTERFACES, CONTROL_PORT = "own name", "interfaces", "control port"
UNPRIVILEGED = 1024
"""The first port that every user can listen on, by the kernel's default."""

_WIDTH = 60


class WantedPort(NamedTuple):
    """A port that a server uses. `flag` sets it; number 0 means any free port."""

    name: str
    number: int
    flag: str


class PortListener(NamedTuple):
    """The process that listens on a port. `pid` is None if this user cannot see the process."""

    pid: int | None
    command: str = ""

    def __str__(self) -> str:
        if self.pid is None:
            return "a process that this user cannot see (run ss -ltnp as root)"
        short = self.command if len(self.command) <= _WIDTH else self.command[:_WIDTH] + "..."
        return f"pid {self.pid} ({short})"


def outside() -> str:
    """Returns the source address for connections to other machines, or loopback if there is no route."""
    found = reachable("")
    return LOOPBACK if found == socket.gethostname() else found


def judge_own_name(name: str, addresses: Sequence[str], why: str, here: str) -> Finding:
    """Judges whether other machines reach this machine by its name.

    Args:
        name: This machine's name.
        addresses: Its addresses, as the resolver answers; empty if there are none.
        why: The resolver's error if there are no addresses.
        here: The address by which other machines reach this machine.
    """
    if not addresses:
        found = f"{name}: {why}: other machines cannot reach this machine by its name"
        return warning(OWN_NAME, found, f"echo '{here} {name}' >> /etc/hosts, on all machines")
    found = f"{name} is {', '.join(addresses)}"
    if all(map(is_loopback, addresses)) and not is_loopback(here):
        found += (
            f", which only this machine reaches: other machines cannot connect to --host {name}, and Gloo"
            " groups that scripts open advertise this address"
        )
        fix = f"map {name} to {here} in /etc/hosts; or run ps-server start --host {here}"
        return warning(OWN_NAME, found, fix)
    return ok(OWN_NAME, found)


def examine_own_name(here: str) -> Iterator[Finding]:
    """Looks up this machine's name. `here` is the address by which other machines reach it."""
    name, why, addresses = socket.gethostname(), "", dict[str, None]()
    try:
        places = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        addresses = dict.fromkeys(str(place[4][0]) for place in places)
    except (OSError, UnicodeError) as error:
        why = str(error)
    yield judge_own_name(name, [*addresses], why, here)


def judge_interfaces(here: Mapping[str, str], ring: str, outside: str) -> Finding:
    """Reports the addresses of this machine for a ring's ranks and for other machines.

    Args:
        here: Address of each interface, by name.
        ring: The address that a ring's ranks use.
        outside: The source address for connections to other machines.
    """
    found = f"a ring uses {_with_interface(here, ring)}"
    if is_loopback(ring) and not is_loopback(outside):
        found += f", for workers on this machine only; other machines use {_with_interface(here, outside)}"
    return ok(INTERFACES, found)


def examine_interfaces(subject: Subject, outside: str) -> Iterator[Finding]:
    """Reads the interfaces. `outside` is the source address for connections to other machines."""
    here = interface_addresses()
    try:
        yield judge_interfaces(here, subject.ring_address, outside)
    except ConfigError as error:
        fix = (
            f"check ip route get {subject.server_host}; connect this machine to a network with a route to it"
        )
        yield failure(INTERFACES, str(error), fix, ServerUnreachable.exit_code)


def wanted_ports(config: ServerConfig) -> list[WantedPort]:
    """Returns the ports that a server with these settings uses."""
    control = WantedPort(CONTROL_PORT, config.port, "--port")
    if config.no_page:
        return [control]
    after = config.port + 1 if config.port else 0
    return [
        control,
        WantedPort("page's port", after if config.page_port is None else config.page_port, "--page-port"),
    ]


def judge_port(port: WantedPort, host: str, refused: int, listener: PortListener | None) -> Finding:
    """Judges whether a server can listen on a port. `refused` is the kernel's errno, or 0."""
    where = f"{bracketed(host)}:{port.number}"
    other = f"run ps-server start {port.flag}"
    if port.number == 0:
        return ok(port.name, "the server picks a free port")
    if refused == 0:
        return ok(port.name, f"{where} is free")
    if refused == errno.EADDRINUSE:
        who = listener or "a process in another network namespace, or one that is exiting"
        if listener and ("ps-server" in listener.command or "hubring.ps.cli" in listener.command):
            return ok(port.name, f"a ps-server uses {where}: {who}; a second server needs {port.flag}")
        return warning(port.name, f"{where} is taken by {who}", f"{other} 0, or stop that process")
    found = f"cannot listen on {where}: {os.strerror(refused)}"
    fix = f"{other} N, with N at least {UNPRIVILEGED}, and --host with an address that ip addr shows"
    return failure(port.name, found, fix)


def examine_ports(config: ServerConfig) -> Iterator[Finding]:
    """Binds each port for an instant."""
    for port in wanted_ports(config):
        try:
            refused = refusal(numeric(config.host), port.number)
        except ConfigError:
            refused = errno.EADDRNOTAVAIL
        yield judge_port(port, config.host, refused, find_listener(port.number) if refused else None)


def find_listener(port: int) -> PortListener | None:
    """Returns the process that listens on a port, at any address, or None."""
    import psutil

    pids = [
        each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port
    ]
    known = min((pid for pid in pids if pid is not None), default=None)
    if known is None:
        return PortListener(None) if pids else None
    try:
        return PortListener(known, " ".join(psutil.Process(known).cmdline()))
    except psutil.Error:  # the process has ended
        return PortListener(known)


def _with_interface(here: Mapping[str, str], address: str) -> str:
    name = next((name for name, own in here.items() if own == address), None)
    return f"{name} {address}" if name else address

"""This machine's network: host names, interfaces, and a server's ports."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hubring.ps.config.address import is_loopback
from hubring.ps.config.server import ServerConfig
from hubring.ps.core.errors import ConfigError, ServerUnreachable
from hubring.ps.doctor.finding import Finding, failure, ok, warning
from hubring.ps.doctor.subject import Subject
from hubring.ps.transport.host import bracketed, numeric, refusal
from hubring.ps.transport.network_interfaces import addresses

OWN_NAME, SERVER_NAME, INTERFACES, CONTROL_PORT = "own name", "server's name", "interfaces", "control port"
GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
SLOW_SECONDS = 1.0

UNPRIVILEGED = 1024
"""The first port that every user can listen on, by the kernel's default."""

_WIDTH = 60


class Answer(NamedTuple):
    """The resolver's answer for a name.

    Attributes:
        name: The name.
        addresses: Its addresses; empty if there are none.
        why: The resolver's error if there are no addresses.
        seconds: How long the resolver took.
    """

    name: str
    addresses: Sequence[str]
    why: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.name} is {', '.join(self.addresses)}" if self.addresses else f"{self.name}: {self.why}"


class Port(NamedTuple):
    """A port that a server uses. `flag` sets it; number 0 means any free port."""

    name: str
    number: int
    flag: str


class Listener(NamedTuple):
    """The process that listens on a port. `pid` is None if this user cannot see the process."""

    pid: int | None
    command: str = ""

    def __str__(self) -> str:
        if self.pid is None:
            return "a process that this user cannot see (run ss -ltnp as root)"
        short = self.command if len(self.command) <= _WIDTH else self.command[:_WIDTH] + "..."
        return f"pid {self.pid} ({short})"


def judge_own_name(answer: Answer, strange: Sequence[str], address: str) -> Finding:
    """Judges whether other machines reach this machine by its name.

    Args:
        answer: The resolver's answer for this machine's name.
        strange: The addresses in `answer` that do not belong to this machine.
        address: The address by which other machines reach this machine.
    """
    name = answer.name
    if not answer.addresses:
        fix = f"echo '{address} {name}' >> /etc/hosts, on all machines"
        return warning(OWN_NAME, f"{answer}: other machines cannot reach this machine by its name", fix)
    if strange:
        return failure(
            OWN_NAME,
            f"{answer}; {', '.join(strange)} is not an address of this machine: the name leads to another"
            " machine",
            f"map {name} to {address} in /etc/hosts or the DNS; or run ps-server start --host {address}",
        )
    if all(map(is_loopback, answer.addresses)) and not is_loopback(address):
        return warning(
            OWN_NAME,
            f"{answer}, which only this machine reaches: other machines cannot connect to --host {name}, and"
            " Gloo groups that scripts open advertise this address",
            f"map {name} to {address} in /etc/hosts; or run ps-server start --host {address}",
        )
    return _judge_speed(OWN_NAME, answer)


def judge_server_name(answer: Answer, here: bool) -> Finding:
    """Judges whether the server's name resolves. `here`: the name is this machine's own."""
    if not answer.addresses:
        fix = "check the spelling, add the name to /etc/hosts, or use the server's address instead"
        return failure(SERVER_NAME, f"{answer}", fix, ServerUnreachable.exit_code)
    if all(map(is_loopback, answer.addresses)) and not here and answer.name != "localhost":
        fix = "correct /etc/hosts, unless the server runs on this machine"
        return warning(SERVER_NAME, f"{answer}, which is this machine", fix)
    if answer.name in answer.addresses:
        return ok(SERVER_NAME, f"{answer.name} is an address; it needs no name server")
    return _judge_speed(SERVER_NAME, answer)


def examine_own_name(address: str) -> Iterator[Finding]:
    """Looks up this machine's name. `address` is the one by which other machines reach this machine."""
    answer = look_up(socket.gethostname())
    # A machine can listen only on its own addresses.
    yield judge_own_name(answer, [each for each in answer.addresses if refusal(each, 0)], address)


def examine_server_name(host: str) -> Iterator[Finding]:
    """Looks up the server's name."""
    answer = look_up(host)
    yield judge_server_name(answer, here=host == socket.gethostname() or is_loopback(host))


def look_up(name: str) -> Answer:
    """Queries the resolver and measures how long it takes."""
    began = time.monotonic()
    found: dict[str, None] = {}
    why = ""
    try:
        places = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        found = dict.fromkeys(str(place[4][0]) for place in places)
    except (OSError, UnicodeError) as error:
        why = str(error)
    return Answer(name, tuple(found), why, time.monotonic() - began)


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


def judge_no_route(server: str, why: str) -> Finding:
    """Reports that no route leads to the server."""
    fix = f"check ip route get {server}; connect this machine to a network with a route to it"
    return failure(INTERFACES, why, fix, ServerUnreachable.exit_code)


def judge_chosen(here: Mapping[str, str], gloo: str | None, nccl: str | None) -> Iterator[Finding]:
    """Judges whether the interfaces exist that environment variables select for Gloo and NCCL."""
    shown = ", ".join(f"{name} {address}" for name, address in here.items() if address)
    best = next((name for name, address in here.items() if address and not is_loopback(address)), "lo")
    if gloo is not None and not gloo_takes(gloo, here):
        yield warning(
            GLOO,
            f"{GLOO}={gloo!r} names an interface that does not exist; there are {shown}. ps-worker's ring"
            " ignores this variable, but Gloo groups that scripts open fail",
            f"export {GLOO}={best}, or unset {GLOO}",
        )
    if nccl is not None and not nccl_takes(nccl, here):
        found = f"{NCCL}={nccl!r} matches no interface; there are {shown}. --backend nccl fails"
        yield failure(NCCL, found, f"export {NCCL}={best}, or unset {NCCL}")


def gloo_takes(value: str, here: Mapping[str, str]) -> bool:
    """Returns whether all interfaces exist that GLOO_SOCKET_IFNAME lists."""
    return all(name in here for name in value.split(","))


def nccl_takes(value: str, here: Mapping[str, str]) -> list[str]:
    """Returns the interfaces that NCCL_SOCKET_IFNAME selects.

    The value lists prefixes, or exact names after `=`. A leading `^` excludes the matches.
    """
    listed = value.removeprefix("^")
    if listed.startswith("="):
        matching = here.keys() & listed[1:].split(",")
    else:
        matching = {name for name in here if name.startswith(tuple(listed.split(",")))}
    return [name for name in here if (name in matching) != value.startswith("^")]


def examine_interfaces(subject: Subject, outside: str) -> Iterator[Finding]:
    """Reads the interfaces. `outside` is the source address for connections to other machines."""
    here = addresses()
    try:
        yield judge_interfaces(here, subject.ring_address, outside)
    except ConfigError as error:
        yield judge_no_route(subject.server_host, str(error))
    yield from judge_chosen(here, subject.variables.get(GLOO), subject.variables.get(NCCL))


def wanted_ports(config: ServerConfig) -> list[Port]:
    """Returns the ports that a server with these settings uses."""
    control = Port(CONTROL_PORT, config.port, "--port")
    if config.no_page:
        return [control]
    after = config.port + 1 if config.port else 0
    return [
        control,
        Port("page's port", after if config.page_port is None else config.page_port, "--page-port"),
    ]


def judge_port(port: Port, host: str, refused: int, listener: Listener | None) -> Finding:
    """Judges whether a server can listen on a port. `refused` is the kernel's errno, or 0."""
    where = f"{bracketed(host)}:{port.number}"
    other = f"run ps-server start {port.flag}"
    if port.number == 0:
        return ok(port.name, "the server picks a free port")
    match refused:
        case 0:
            return ok(port.name, f"{where} is free")
        case errno.EADDRINUSE if listener and (
            "ps-server" in listener.command or "hubring.ps.cli" in listener.command
        ):
            return ok(port.name, f"a ps-server uses {where}: {listener}; a second server needs {port.flag}")
        case errno.EADDRINUSE:
            who = listener or "a process in another network namespace, or one that is exiting"
            return warning(port.name, f"{where} is taken by {who}", f"{other} 0, or stop that process")
        case errno.EACCES:
            found = f"{where} needs a privileged user"
            return failure(port.name, found, f"{other} N, with N at least {UNPRIVILEGED}")
        case errno.EADDRNOTAVAIL:
            found = f"{host} is not an address of this machine"
            return failure(port.name, found, "run ps-server start --host with an address that ip addr shows")
        case _:
            found = f"cannot listen on {where}: {os.strerror(refused)}"
            return failure(port.name, found, f"{other} 0, or use another --host")


def examine_ports(config: ServerConfig) -> Iterator[Finding]:
    """Binds each port for an instant."""
    for port in wanted_ports(config):
        try:
            refused = refusal(numeric(config.host), port.number)
        except ConfigError:
            refused = errno.EADDRNOTAVAIL
        yield judge_port(port, config.host, refused, find_listener(port.number) if refused else None)


def find_listener(port: int) -> Listener | None:
    """Returns the process that listens on a port, at any address, or None."""
    import psutil

    pids = [
        each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port
    ]
    known = min((pid for pid in pids if pid is not None), default=None)
    if known is None:
        return Listener(None) if pids else None
    try:
        return Listener(known, " ".join(psutil.Process(known).cmdline()))
    except psutil.Error:  # the process has ended
        return Listener(known)


def _judge_speed(name: str, answer: Answer) -> Finding:
    if answer.seconds < SLOW_SECONDS:
        return ok(name, str(answer))
    found = f"{answer}, but the lookup took {answer.seconds:.1f} s"
    fix = "remove the name server that does not answer from /etc/resolv.conf, or add the name to /etc/hosts"
    return warning(name, found, fix)


def _with_interface(here: Mapping[str, str], address: str) -> str:
    name = next((name for name, own in here.items() if own == address), None)
    return f"{name} {address}" if name else address

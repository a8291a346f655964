"""This machine's network: what names of hosts stand for, interfaces, and the ports of a server."""

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
"""The first port that every user may listen on, by the kernel's default."""

_WIDTH = 60


class Answer(NamedTuple):
    """What a name stands for, after so many seconds; if for no address, `why` is the resolver's error."""

    name: str
    addresses: Sequence[str]
    why: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.name} is {', '.join(self.addresses)}" if self.addresses else f"{self.name}: {self.why}"


class Port(NamedTuple):
    """A port that a server takes; the flag chooses another, and number 0 stands for any free one."""

    name: str
    number: int
    flag: str


class Listener(NamedTuple):
    """The process that listens on a port; its id is None where this user may not see it."""

    pid: int | None
    command: str = ""

    def __str__(self) -> str:
        if self.pid is None:
            return "a process that this user may not see (as root: ss -ltnp)"
        short = self.command if len(self.command) <= _WIDTH else self.command[:_WIDTH] + "..."
        return f"pid {self.pid} ({short})"


def judge_own_name(answer: Answer, strange: Sequence[str], address: str) -> Finding:
    """Whether others, who reach this machine by `address`, find it by its name too.

    `strange` are the addresses of its name that are not its own.
    """
    name = answer.name
    if not answer.addresses:
        mend = f"echo '{address} {name}' >> /etc/hosts, on all machines"
        return warning(OWN_NAME, f"{answer}: who is told this name finds no machine", mend)
    if strange:
        return failure(
            OWN_NAME,
            f"{answer}; {', '.join(strange)} is no address of this machine: who dials the name gets another",
            f"correct /etc/hosts or the DNS: {name} is {address}; or ps-server start --host {address}"
            " --insecure",
        )
    if all(map(is_loopback, answer.addresses)) and not is_loopback(address):
        return warning(
            OWN_NAME,
            f"{answer}, which only this machine reaches: --host {name} listens for nobody else, and"
            " groups that scripts open by Gloo offer it to the others",
            f"in /etc/hosts let {name} be {address}; or ps-server start --host {address} --insecure",
        )
    return _judge_speed(OWN_NAME, answer)


def judge_server_name(answer: Answer, here: bool) -> Finding:
    """Whether the server's name leads anywhere; it may be the name of the machine `here`."""
    if not answer.addresses:
        mend = "check its spelling; else a line in /etc/hosts, or the server's address in place of its name"
        return failure(SERVER_NAME, f"{answer}", mend, ServerUnreachable.exit_code)
    if all(map(is_loopback, answer.addresses)) and not here and answer.name != "localhost":
        mend = "correct it in /etc/hosts, unless the server runs here"
        return warning(SERVER_NAME, f"{answer}, which is this machine and no other", mend)
    if answer.name in answer.addresses:
        return ok(SERVER_NAME, f"{answer.name} is an address, and needs no name server")
    return _judge_speed(SERVER_NAME, answer)


def examine_own_name(address: str) -> Iterator[Finding]:
    """Looks this machine's name up; `address` is how others reach it."""
    answer = look_up(socket.gethostname())
    # Only on its own addresses can a machine listen.
    yield judge_own_name(answer, [each for each in answer.addresses if refusal(each, 0)], address)


def examine_server_name(host: str) -> Iterator[Finding]:
    """Looks the server's name up."""
    answer = look_up(host)
    yield judge_server_name(answer, here=host == socket.gethostname() or is_loopback(host))


def look_up(name: str) -> Answer:
    """Asks the resolver, which may be slow."""
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
    """Where a ring's ranks dial this machine, and from which address it talks to others."""
    found = f"a ring meets on {_with_interface(here, ring)}"
    if is_loopback(ring) and not is_loopback(outside):
        found += f", for workers of this machine alone; to others it is {_with_interface(here, outside)}"
    return ok(INTERFACES, found)


def judge_no_route(server: str, why: str) -> Finding:
    """No route leads to the server."""
    mend = f"ip route get {server}; give this machine a network that leads there"
    return failure(INTERFACES, why, mend, ServerUnreachable.exit_code)


def judge_chosen(here: Mapping[str, str], gloo: str | None, nccl: str | None) -> Iterator[Finding]:
    """Whether the interfaces exist that environment variables choose for Gloo and NCCL."""
    shown = ", ".join(f"{name} {address}" for name, address in here.items() if address)
    best = next((name for name, address in here.items() if address and not is_loopback(address)), "lo")
    if gloo is not None and not gloo_takes(gloo, here):
        yield warning(
            GLOO,
            f"{GLOO}={gloo!r} names an interface that is not here; there are {shown}. ps-worker's ring"
            " does not read it, but groups that scripts open fail by it",
            f"export {GLOO}={best}, or unset {GLOO}",
        )
    if nccl is not None and not nccl_takes(nccl, here):
        found = f"{NCCL}={nccl!r} leaves no interface; there are {shown}. --backend nccl fails by it"
        yield failure(NCCL, found, f"export {NCCL}={best}, or unset {NCCL}")


def gloo_takes(value: str, here: Mapping[str, str]) -> bool:
    """Whether all interfaces exist that GLOO_SOCKET_IFNAME lists."""
    return all(name in here for name in value.split(","))


def nccl_takes(value: str, here: Mapping[str, str]) -> list[str]:
    """The interfaces that NCCL_SOCKET_IFNAME leaves: prefixes, after `=` names; `^` excludes them."""
    listed = value.removeprefix("^")
    if listed.startswith("="):
        matching = here.keys() & listed[1:].split(",")
    else:
        matching = {name for name in here if name.startswith(tuple(listed.split(",")))}
    return [name for name in here if (name in matching) != value.startswith("^")]


def examine_interfaces(subject: Subject, outside: str) -> Iterator[Finding]:
    """Asks the kernel; `outside` is the address from which this machine talks to others."""
    here = addresses()
    try:
        yield judge_interfaces(here, subject.ring_address, outside)
    except ConfigError as error:
        yield judge_no_route(subject.server_host, str(error))
    yield from judge_chosen(here, subject.variables.get(GLOO), subject.variables.get(NCCL))


def wanted_ports(config: ServerConfig) -> list[Port]:
    """The ports that a server with these settings takes."""
    control = Port(CONTROL_PORT, config.port, "--port")
    if config.no_page:
        return [control]
    after = config.port + 1 if config.port else 0
    return [
        control,
        Port("page's port", after if config.page_port is None else config.page_port, "--page-port"),
    ]


def judge_port(port: Port, host: str, refused: int, listener: Listener | None) -> Finding:
    """Whether a server could listen there; `refused` is the kernel's errno, or 0."""
    where = f"{bracketed(host)}:{port.number}"
    other = f"ps-server start {port.flag}"
    if port.number == 0:
        return ok(port.name, "a free one will be taken")
    match refused:
        case 0:
            return ok(port.name, f"{where} is free")
        case errno.EADDRINUSE if listener and (
            "ps-server" in listener.command or "hubring.ps.cli" in listener.command
        ):
            return ok(port.name, f"a ps-server has {where}: {listener}; a second one needs {port.flag}")
        case errno.EADDRINUSE:
            who = listener or "a process in another network namespace, or one that is ending"
            return warning(port.name, f"{where} is taken by {who}", f"{other} 0, or stop that")
        case errno.EACCES:
            found = f"{where} is for privileged programs"
            return failure(port.name, found, f"{other} N, with N from {UNPRIVILEGED} on")
        case errno.EADDRNOTAVAIL:
            found = f"{host} is no address of this machine"
            return failure(port.name, found, "ps-server start --host, with an address that ip addr shows")
        case _:
            found = f"{where} cannot be had: {os.strerror(refused)}"
            return failure(port.name, found, f"{other} 0, or --host")


def examine_ports(config: ServerConfig) -> Iterator[Finding]:
    """Takes each port for an instant."""
    for port in wanted_ports(config):
        try:
            refused = refusal(numeric(config.host), port.number)
        except ConfigError:
            refused = errno.EADDRNOTAVAIL
        yield judge_port(port, config.host, refused, find_listener(port.number) if refused else None)


def find_listener(port: int) -> Listener | None:
    """The process that listens on a port, at any address; None: no process does."""
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
    except psutil.Error:  # it ended meanwhile
        return Listener(known)


def _judge_speed(name: str, answer: Answer) -> Finding:
    if answer.seconds < SLOW_SECONDS:
        return ok(name, str(answer))
    found = f"{answer}, found only after {answer.seconds:.1f} s"
    mend = "a name server in /etc/resolv.conf does not answer: take it out, or put the name into /etc/hosts"
    return warning(name, found, mend)


def _with_interface(here: Mapping[str, str], address: str) -> str:
    name = next((name for name, own in here.items() if own == address), None)
    return f"{name} {address}" if name else address

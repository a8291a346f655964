"""This machine's network, and the server at an address.

Host names, interfaces and a server's ports; whether the server is reachable, its version, its clock, and the
user's certificate.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import ssl
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import NamedTuple

from hubring.ps.config.server import ServerConfig
from hubring.ps.config.values import address, is_loopback
from hubring.ps.core import timing
from hubring.ps.core.errors import ConfigError, ServerUnreachable
from hubring.ps.core.timing import ClockOffset
from hubring.ps.core.types import PROTOCOL
from hubring.ps.doctor.check import LOOPBACK, Finding, Subject, failure, ok, skipped, warning
from hubring.ps.doctor.software import PACKAGE
from hubring.ps.transport.grpc.calls import details, whole
from hubring.ps.transport.host import (
    bracketed,
    interface_addresses,
    numeric,
    reachable,
    refusal,
    start_command,
)

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
    control, page = WantedPort(CONTROL_PORT, config.port, "--port"), config.status_port
    return [control] if page is None else [control, WantedPort("page's port", page, "--page-port")]


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


CERTIFICATE = "certificate"

SOON_DAYS = 14.0
"""A certificate that ends within this time is a warning: a job may outlive it."""


def examine_certificate(subject: Subject) -> Iterator[Finding]:
    """Reads the files, and runs a handshake of the certificate with itself."""
    from hubring.ps.security.certificate import load_certificate, names_in

    files = subject.config.tls
    if not files:
        why = "not set (--tls-cert, --tls-ca): the server makes one, and its token proves it"
        yield skipped(CERTIFICATE, why)
        return
    try:
        own = load_certificate(files, serves=subject.server is None and files.cert is not None)
    except ConfigError as error:
        found, _, fix = str(error).partition("; ")
        yield failure(CERTIFICATE, found, fix or "check the files")
        return
    if files.cert is None or files.key is None:
        yield ok(CERTIFICATE, f"{files.ca} has the certificates of an authority")
        return
    ends = own.subject["notAfter"]
    about = f"{files.cert}, for {', '.join(names_in(own.subject))},"
    days = (ssl.cert_time_to_seconds(ends) - time.time()) / 86400
    if days < SOON_DAYS:
        found = f"{about} expires in {days:.1f} days ({ends})"
        yield warning(CERTIFICATE, found, "renew it before long jobs")
    else:
        yield ok(CERTIFICATE, f"{about} is valid until {ends}")
    if files.key.stat().st_mode & stat.S_IRWXO:
        found = f"all users of this host can read the private key in {files.key}"
        yield warning(CERTIFICATE, found, f"chmod 600 {files.key}")


SERVER, VERSIONS, CLOCKS = "server", "versions", "clocks"

SKEW_SECONDS = 1.0
"""Far more than NTP leaves. Only logs need synchronized clocks; a lease uses one machine's clock."""

SHARE, MOST_SECONDS = 0.3, 10.0
"""Time limit for connecting and for each answer: a share of the check's seconds, to leave time to report."""

_BANNER = "use the address in the banner of ps-server start, with the control port, not the page's port"
_OF_MESSAGE = "check --token-file, and --tls-cert, --tls-key and --tls-ca if the server needs them"


def judge_silence(server: str, error: str, listener: str) -> Finding:
    """Explains that no server answers. `listener` is what `probe` found at the address."""
    host, _ = address(server)
    found, _, fix = listener.partition("; if ")
    start = (
        f"on that host, run {start_command(server)}, or {_BANNER}; otherwise check ping {host} and its"
        " firewall: all ports between the job's hosts must be open, because shards use free ports"
    )
    fix = f"if {fix}" if fix else start
    return failure(SERVER, f"{error}: {found}", fix, ServerUnreachable.exit_code)


def judge_refusal(server: str, status: str, details: str) -> Finding:
    """Explains a call that the process at the address refused, from its gRPC status and details."""
    if status == "UNAUTHENTICATED":
        return failure(
            SERVER,
            f"the server at {server} refuses this user: {details}",
            "copy the token file that its banner names, and pass it with --token-file or PS_TOKEN_FILE",
        )
    found = f"the process at {server} does not answer as a ps-server does ({status}: {details})"
    return failure(SERVER, found, _BANNER, ServerUnreachable.exit_code)


def judge_versions(here: str, version: str | None, protocol: int | None, server: str) -> Finding:
    """Judges whether this machine's version works with the server's.

    Args:
        here: The version of Hubring on this machine.
        version: The server's; None: it is older than protocol 4, and reports none.
        protocol: The server's protocol.
        server: The server's address.
    """
    ours = f"{PACKAGE} {here} (protocol {PROTOCOL}) here"
    both = f"{ours}, {version or 'version unknown'} (protocol {protocol or 'unknown'}) at {server}"
    install = f"pip install '{PACKAGE}=={version or 'VERSION'}' here, or '{PACKAGE}=={here}' on the server"
    if protocol != PROTOCOL:
        return failure(VERSIONS, f"{both}: the server refuses workers with another protocol", install)
    if version != here:
        found = f"{both}: the protocol is the same, but these versions are not tested together"
        return warning(VERSIONS, found, install)
    return ok(VERSIONS, f"{ours}, the same at {server}")


def judge_clocks(measured: ClockOffset, server: str) -> Finding:
    """Judges the difference between the server's clock and this machine's."""
    ahead, error = measured.ahead / 1e9, measured.round_trip / 2e9
    way = f"round trip {measured.round_trip / 1e6:.3g} ms"
    if abs(ahead) - error > SKEW_SECONDS:
        side = "ahead of" if ahead > 0 else "behind"
        return warning(
            CLOCKS,
            f"the clock of {server} is {abs(ahead):.1f} s {side} this machine's clock ({way}): times in their"
            " logs do not match",
            "on both machines, run timedatectl set-ntp true, or chronyc makestep",
        )
    found = f"{server} is {ahead * 1e3:+.3g} ms from this machine (error {error * 1e3:.3g} ms; {way})"
    return ok(CLOCKS, found)


def examine_server(server: str, config: ServerConfig, seconds: float) -> Iterator[Finding]:
    """Connects to the server, requests its status, then its time. Ends where one of these fails."""
    import grpc

    from hubring.protos import control_pb2 as pb
    from hubring.protos.control_pb2_grpc import ControlStub
    from hubring.ps.core.errors import HubringError
    from hubring.ps.security.access import find_access
    from hubring.ps.security.certificate import load_certificate
    from hubring.ps.security.guard import Role
    from hubring.ps.transport.grpc.channel import open_channel
    from hubring.ps.transport.host import probe

    seconds = min(SHARE * seconds, MOST_SECONDS)
    try:
        own = load_certificate(config.tls, serves=False)
        access = find_access(server, Role.READER, config.token_file, seconds, own, insecure=config.insecure)
    except ServerUnreachable as error:
        yield judge_silence(server, str(error), probe(server))
        return
    except HubringError as error:
        found, _, fix = str(error).partition("; ")
        yield failure(SERVER, found, fix or _OF_MESSAGE, error.exit_code)
        return
    with open_channel(server, access) as channel:
        stub = ControlStub(channel)
        try:
            report = json.loads(whole(stub.Status(pb.StatusRequest(), timeout=seconds)).json)
        except grpc.RpcError as error:
            status = error.code().name
            if status in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                yield judge_silence(server, f"no ps-server answers at {server} ({status})", probe(server))
            else:
                yield judge_refusal(server, status, details(error) or "no details")
            return
        job = f"job {report['job']!r}: " if report.get("job") else ""
        yield ok(SERVER, f"a ps-server answers at {server}; {job}{report.get('state', 'state unknown')}")
        there = report.get("version"), report.get("protocol")
        yield judge_versions(metadata.version(PACKAGE), *there, server)
        try:
            measured = timing.measure_offset(
                lambda: whole(stub.Clock(pb.ClockRequest(), timeout=seconds)).time_ns
            )
        except grpc.RpcError as error:
            why = f"{server} does not report its time ({error.code().name}): it has another version"
            yield skipped(CLOCKS, why)
        else:
            yield judge_clocks(measured, server)

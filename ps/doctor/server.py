"""The server at an address: whether it is reachable, its version, and its clock."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any, NamedTuple

from hubring.ps.config.address import address
from hubring.ps.config.server import ServerConfig
from hubring.ps.core import clock_offset
from hubring.ps.core.clock_offset import Offset
from hubring.ps.core.errors import ServerUnreachable
from hubring.ps.core.types import PROTOCOL
from hubring.ps.doctor.finding import Finding, failure, ok, skipped, warning
from hubring.ps.doctor.software import PACKAGE
from hubring.ps.transport.grpc.call_error import details, whole

SERVER, VERSIONS, CLOCKS = "server", "versions", "clocks"

SKEW_SECONDS = 1.0
"""Far more than NTP leaves. Only logs need synchronized clocks; a lease uses one machine's clock."""

SHARE, MOST_SECONDS = 0.3, 10.0
"""Time limit for connecting and for each answer: a share of the check's seconds, to leave time to report."""

_NO_SERVER = "no ps-server answers at {}"
_NO_ENTRY = "the server at {} refuses this user"
_BANNER = "use the address in the banner of ps-server start, with the control port, not the page's port"
_OF_MESSAGE = "check --token-file, and --tls-cert, --tls-key and --tls-ca if the server needs them"


class End(NamedTuple):
    """The version at one end. A server before protocol 4 reports no version; its values are None."""

    version: str | None
    protocol: int | None


def judge_connection(server: str, error: OSError, seconds: float) -> Finding:
    """Explains why connecting to the server failed."""
    host, port = address(server)
    if isinstance(error, socket.gaierror):
        fix = "check the spelling, or use the server's address instead of its name"
        return _unreachable(f"no host is named {host} ({error.strerror})", fix)
    if isinstance(error, ConnectionRefusedError):
        return _unreachable(
            f"nothing listens at {server}: connection refused",
            f"on that host, run ps-server start --host {host} --port {port}. If a server already runs,"
            f" {_BANNER}",
        )
    if isinstance(error, TimeoutError):
        return _unreachable(
            f"{server} did not answer within {seconds:.1f} s: the host is down, or a firewall drops packets",
            f"check the host with ping {host}; open TCP port {port} on it, and all ports between the job's"
            " hosts, because shards use free ports",
        )
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL):
        return _unreachable(f"no route to {server}: {error.strerror}", f"check ip route get {host}")
    found = f"{server} closed the connection: {error.strerror or error}"
    return _unreachable(found, f"check ping {host}; {_BANNER}")


def judge_silence(error: str, listener: str) -> Finding:
    """Explains that no server has proved itself. `listener` is what `port_probe` found."""
    found, _, fix = listener.partition("; if ")
    return _unreachable(f"{error}: {found}", f"if {fix}" if fix else _BANNER)


def judge_refusal(server: str, status: str, details: str, seconds: float) -> Finding:
    """Explains a failed gRPC call, from its status and details."""
    if status == "UNIMPLEMENTED":
        return _unreachable(f"the process at {server} speaks gRPC, but is not a ps-server", _BANNER)
    if status == "DEADLINE_EXCEEDED":
        return _unreachable(
            f"the process at {server} accepts connections, but did not answer within {seconds:.1f} s: it is"
            " stopped, overloaded, or not a ps-server",
            "on that host, find the process with ss -ltnp; if its state is T (ps -o stat), kill -CONT it;"
            f" otherwise {_BANNER}",
        )
    if status == "UNAUTHENTICATED":
        return failure(
            SERVER,
            f"the server at {server} refuses this user: {details}",
            "copy the token file that its banner names, and pass it with --token-file or PS_TOKEN_FILE",
        )
    found = f"the process at {server} does not answer as a ps-server does ({status}: {details})"
    return _unreachable(found, _BANNER)


def judge_report(server: str, report: Mapping[str, Any]) -> Finding:
    """Reports the server's job and state."""
    job = f"job {report['job']!r}: " if report.get("job") else ""
    return ok(SERVER, f"a ps-server answers at {server}; {job}{report.get('state', 'state unknown')}")


def judge_versions(here: End, there: End, server: str) -> Finding:
    """Judges whether this machine's version works with the server's."""
    ours = f"{PACKAGE} {here.version} (protocol {here.protocol}) here"
    version, protocol = there.version or "version unknown", there.protocol or "unknown"
    both = f"{ours}, {version} (protocol {protocol}) at {server}"
    theirs = there.version or "VERSION"
    install = f"pip install '{PACKAGE}=={theirs}' here, or '{PACKAGE}=={here.version}' on the server"
    if there.protocol != here.protocol:
        return failure(VERSIONS, f"{both}: the server refuses workers with another protocol", install)
    if there.version != here.version:
        found = f"{both}: the protocol is the same, but these versions are not tested together"
        return warning(VERSIONS, found, install)
    return ok(VERSIONS, f"{ours}, the same at {server}")


def judge_clocks(measured: Offset, server: str) -> Finding:
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


def examine(server: str, config: ServerConfig, seconds: float) -> Iterator[Finding]:
    """Connects to the server, requests its status, then its time."""
    patience = min(SHARE * seconds, MOST_SECONDS)
    try:
        socket.create_connection(address(server), patience).close()
    except OSError as error:
        yield judge_connection(server, error, patience)
        yield from _left_out(server)
    else:
        yield from _ask(server, config, patience)


def _ask(server: str, config: ServerConfig, seconds: float) -> Iterator[Finding]:
    import grpc

    from hubring.protos import control_pb2 as pb
    from hubring.protos.control_pb2_grpc import ControlStub
    from hubring.ps.core.errors import HubringError
    from hubring.ps.security.access import find
    from hubring.ps.security.own_certificate import load
    from hubring.ps.security.policy import Role
    from hubring.ps.transport.grpc.channel import open_channel
    from hubring.ps.transport.port_probe import probe

    try:
        own = load(config.tls, serves=False)
        access = find(server, Role.READER, config.token_file, seconds, own, insecure=config.insecure)
    except ServerUnreachable as error:
        yield judge_silence(str(error), probe(server))
        yield from _left_out(server)
        return
    except HubringError as error:
        found, _, fix = str(error).partition("; ")
        yield failure(SERVER, found, fix or _OF_MESSAGE, error.exit_code)
        yield from _left_out(server, _NO_ENTRY)
        return
    with open_channel(server, access) as channel:
        stub = ControlStub(channel)
        try:
            report = json.loads(whole(stub.Status(pb.StatusRequest(), timeout=seconds)).json)
        except grpc.RpcError as error:
            status = error.code().name
            yield judge_refusal(server, status, details(error) or "no details", seconds)
            yield from _left_out(server, _NO_ENTRY if status == "UNAUTHENTICATED" else _NO_SERVER)
            return
        yield judge_report(server, report)
        here = End(metadata.version(PACKAGE), PROTOCOL)
        yield judge_versions(here, End(report.get("version"), report.get("protocol")), server)
        try:
            measured = clock_offset.measure(
                lambda: whole(stub.Clock(pb.ClockRequest(), timeout=seconds)).time_ns
            )
        except grpc.RpcError as error:
            why = f"{server} does not report its time ({error.code().name}): it has another version"
            yield skipped(CLOCKS, why)
        else:
            yield judge_clocks(measured, server)


def _left_out(server: str, why: str = _NO_SERVER) -> Iterator[Finding]:
    for name in (VERSIONS, CLOCKS):
        yield skipped(name, why.format(server))


def _unreachable(found: str, fix: str) -> Finding:
    return failure(SERVER, found, fix, ServerUnreachable.exit_code)

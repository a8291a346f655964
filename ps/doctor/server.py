"""The server at an address: reachable, one of ours, of our version, and with the same time."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any, NamedTuple

from hubring.ps.config.address import address
from hubring.ps.core import clock_offset
from hubring.ps.core.clock_offset import Offset
from hubring.ps.core.errors import ServerUnreachable
from hubring.ps.core.types import PROTOCOL
from hubring.ps.doctor.finding import Finding, failure, ok, skipped, warning
from hubring.ps.doctor.software import OURS

SERVER, VERSIONS, CLOCKS = "server", "versions", "clocks"

SKEW_SECONDS = 1.0
"""Far more than NTP leaves. Leases run on each machine's own time; logs of several are read side by side."""

SHARE, MOST_SECONDS = 0.3, 10.0
"""How long connecting and an answer may take each: a share of the check's seconds, so that it can report."""

_BANNER = "the banner of ps-server start names the address to give: the control port's, and not the page's"


class End(NamedTuple):
    """What runs at one end; None where it does not say, as servers before protocol 4 did not."""

    version: str | None
    protocol: int | None


def judge_connection(server: str, error: OSError, seconds: float) -> Finding:
    """Why the server accepted no connection."""
    host, port = address(server)
    if isinstance(error, socket.gaierror):
        mend = "give the server's address in place of its name"
        return _unreachable(f"{host} is the name of no host ({error.strerror})", mend)
    if isinstance(error, ConnectionRefusedError):
        return _unreachable(
            f"nothing listens at {server}: the connection was refused",
            f"on that machine: ps-server start --host {host} --port {port} (beyond loopback also --insecure)."
            f" If one runs there, {_BANNER}",
        )
    if isinstance(error, TimeoutError):
        return _unreachable(
            f"{server} did not answer within {seconds:.1f} s: it is off, or a firewall drops what comes",
            f"open TCP port {port} there, and among the job's machines all, since shards take free ones;"
            f" ping {host} tells which",
        )
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL):
        return _unreachable(f"no network leads to {server}: {error.strerror}", f"ip route get {host}")
    found = f"{server} broke the connection off: {error.strerror or error}"
    return _unreachable(found, f"ping {host}; {_BANNER}")


def judge_refusal(server: str, status: str, details: str, seconds: float) -> Finding:
    """What answers is no server of ours, by gRPC's status and message."""
    if status == "UNIMPLEMENTED":
        return _unreachable(f"what answers at {server} speaks gRPC, but is no ps-server", _BANNER)
    if status == "DEADLINE_EXCEEDED":
        return _unreachable(
            f"what listens at {server} takes connections, but said nothing within {seconds:.1f} s: it is"
            " stopped, held up, or no ps-server",
            f"on that machine ss -ltnp shows the process: kill -CONT it if its state is T (ps -o stat); else"
            f" {_BANNER}",
        )
    found = f"what listens at {server} does not speak as a ps-server does ({status}: {details})"
    return _unreachable(found, _BANNER)


def judge_report(server: str, report: Mapping[str, Any]) -> Finding:
    """How the server is doing."""
    job = f"job {report['job']!r}: " if report.get("job") else ""
    return ok(SERVER, f"a ps-server answers at {server}; {job}{report.get('state', 'its state is unknown')}")


def judge_versions(here: End, there: End, server: str) -> Finding:
    """Whether both ends understand each other."""
    ours = f"{OURS} {here.version} (protocol {here.protocol}) here"
    version, protocol = there.version or "one of unknown version", there.protocol or "unknown"
    both = f"{ours}, {version} (protocol {protocol}) at {server}"
    if there.protocol != here.protocol:
        return failure(
            VERSIONS,
            f"{both}: it refuses workers of another protocol",
            f"install the same version on both: here pip install '{OURS}=={there.version or 'VERSION'}', or"
            f" there '{OURS}=={here.version}'",
        )
    if there.version != here.version:
        mend = f"pip install '{OURS}=={there.version}' here, or '{OURS}=={here.version}' there"
        return warning(VERSIONS, f"{both}: they understand each other, but were not tested together", mend)
    return ok(VERSIONS, f"{ours}, the same at {server}")


def judge_clocks(measured: Offset, server: str) -> Finding:
    """Whether the two machines agree on the time."""
    ahead, error = measured.ahead / 1e9, measured.round_trip / 2e9
    way = f"round trip {measured.round_trip / 1e6:.3g} ms"
    if abs(ahead) - error > SKEW_SECONDS:
        side = "ahead of" if ahead > 0 else "behind"
        return warning(
            CLOCKS,
            f"the clock of {server} is {abs(ahead):.1f} s {side} this machine's ({way}): times in their logs"
            " do not go together",
            "on both machines: timedatectl set-ntp true, or chronyc makestep",
        )
    found = f"{server}'s is {ahead * 1e3:+.3g} ms from this machine's, to {error * 1e3:.3g} ms; {way}"
    return ok(CLOCKS, found)


def examine(server: str, seconds: float) -> Iterator[Finding]:
    """Connects, asks the server how it is doing, then asks for the time."""
    patience = min(SHARE * seconds, MOST_SECONDS)
    try:
        socket.create_connection(address(server), patience).close()
    except OSError as error:
        yield judge_connection(server, error, patience)
        yield from _left_out(server)
    else:
        yield from _ask(server, patience)


def _ask(server: str, seconds: float) -> Iterator[Finding]:
    import grpc

    from hubring.protos import control_pb2 as pb
    from hubring.protos.control_pb2_grpc import ControlStub
    from hubring.ps.transport.grpc.channel import open_channel

    with open_channel(server) as channel:
        stub = ControlStub(channel)
        try:
            report = json.loads(stub.Status(pb.StatusRequest(), timeout=seconds).json)
        except grpc.RpcError as error:
            yield judge_refusal(server, error.code().name, error.details() or "no details", seconds)
            yield from _left_out(server)
            return
        yield judge_report(server, report)
        here = End(metadata.version(OURS), PROTOCOL)
        yield judge_versions(here, End(report.get("version"), report.get("protocol")), server)
        try:
            measured = clock_offset.measure(lambda: stub.Clock(pb.ClockRequest(), timeout=seconds).time_ns)
        except grpc.RpcError as error:
            why = f"{server} does not tell its time ({error.code().name}): it is of another version"
            yield skipped(CLOCKS, why)
        else:
            yield judge_clocks(measured, server)


def _left_out(server: str) -> Iterator[Finding]:
    for name in (VERSIONS, CLOCKS):
        yield skipped(name, f"no ps-server answers at {server}")


def _unreachable(found: str, mend: str) -> Finding:
    return failure(SERVER, found, mend, ServerUnreachable.exit_code)

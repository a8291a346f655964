"""The server at an address: whether it is reachable, its version, its clock; the user's certificate."""

from __future__ import annotations

import json
import ssl
import stat
import time
from collections.abc import Iterator
from importlib import metadata

from hubring.ps.config.server import ServerConfig
from hubring.ps.config.values import address
from hubring.ps.core import timing
from hubring.ps.core.errors import ConfigError, ServerUnreachable
from hubring.ps.core.timing import ClockOffset
from hubring.ps.core.types import PROTOCOL
from hubring.ps.doctor.check import Finding, Subject, failure, ok, skipped, warning
from hubring.ps.doctor.software import PACKAGE
from hubring.ps.transport.grpc.calls import details, whole

CERTIFICATE = "certificate"

SOON_DAYS = 14.0
"""A certificate that ends within this time is a warning: a job may outlive it."""


def examine_certificate(subject: Subject) -> Iterator[Finding]:
    """Reads the files, and runs a handshake of the certificate with itself."""
    from hubring.ps.security.certificate import load_certificate, names_in

    files = subject.config.tls
    if not files:
        yield skipped(
            CERTIFICATE, "not set (--tls-cert, --tls-ca): the server makes one, and its token proves it"
        )
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
        yield warning(
            CERTIFICATE, f"{about} expires in {days:.1f} days ({ends})", "renew it before long jobs"
        )
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
    host, port = address(server)
    found, _, fix = listener.partition("; if ")
    start = (
        f"on that host, run ps-server start --port {port}, or {_BANNER}; otherwise check ping {host} and its"
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

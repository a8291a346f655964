"""The server: what the doctor says of it."""

from __future__ import annotations

import errno
import socket

from hubring.ps.core.clock_offset import Offset
from hubring.ps.doctor import server
from hubring.ps.doctor.server import End
from hubring.ps.transport.port_probe import probe
from tests.ps.doctor.case import Case, judgements
from tests.ps.security.health_server import serving

ADDR = "hub1:5555"
SECOND = 10**9

CASES = [
    Case(
        server.judge_connection(ADDR, socket.gaierror(-2, "Name or service not known"), 4),
        "failure",
        "no host is named hub1 (Name or service not known)",
        "use the server's address instead of its name",
    ),
    Case(
        server.judge_connection(ADDR, ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), 4),
        "failure",
        "nothing listens at hub1:5555: connection refused",
        "ps-server start --host hub1 --port 5555",
    ),
    Case(
        server.judge_connection(ADDR, TimeoutError("timed out"), 4),
        "failure",
        "hub1:5555 did not answer within 4.0 s: the host is down, or a firewall drops packets",
        "open TCP port 5555 on it",
    ),
    Case(
        server.judge_connection(ADDR, OSError(errno.EHOSTUNREACH, "No route to host"), 4),
        "failure",
        "no route to hub1:5555: No route to host",
        "ip route get hub1",
    ),
    Case(
        server.judge_connection(ADDR, ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), 4),
        "failure",
        "hub1:5555 closed the connection: Connection reset by peer",
        "ping hub1",
    ),
    Case(
        server.judge_silence("no server with TLS answers at hub1:5555", "it is mute; it is stopped"),
        "failure",
        "no server with TLS answers at hub1:5555: it is mute; it is stopped",
        "with the control port, not the page's port",
    ),
    Case(
        server.judge_refusal(ADDR, "UNIMPLEMENTED", "Method not found!", 4),
        "failure",
        "the process at hub1:5555 speaks gRPC, but is not a ps-server",
        "the banner of ps-server start",
    ),
    Case(
        server.judge_refusal(ADDR, "DEADLINE_EXCEEDED", "", 4),
        "failure",
        "accepts connections, but did not answer within 4.0 s",
        "kill -CONT",
    ),
    Case(
        server.judge_refusal(ADDR, "UNAVAILABLE", "Socket closed", 4),
        "failure",
        "does not answer as a ps-server does (UNAVAILABLE: Socket closed)",
        "with the control port, not the page's port",
    ),
    Case(
        server.judge_report(ADDR, {"job": "train.py", "state": "waiting for 1 of 2 workers"}),
        "ok",
        "a ps-server answers at hub1:5555; job 'train.py': waiting for 1 of 2 workers",
    ),
    Case(server.judge_report(ADDR, {}), "ok", "state unknown"),
    Case(
        server.judge_versions(End("1.2.0", 4), End("1.2.0", 4), ADDR), "ok", "hubring 1.2.0 (protocol 4) here"
    ),
    Case(
        server.judge_versions(End("1.2.0", 4), End("2.0.0", 5), ADDR),
        "failure",
        "here, 2.0.0 (protocol 5) at hub1:5555: the server refuses workers with another protocol",
        "pip install 'hubring==2.0.0' here, or 'hubring==1.2.0' on the server",
    ),
    Case(
        server.judge_versions(End("1.2.0", 4), End(None, None), ADDR),
        "failure",
        "version unknown (protocol unknown) at hub1:5555",
        "pip install 'hubring==VERSION' here, or 'hubring==1.2.0' on the server",
    ),
    Case(
        server.judge_versions(End("1.2.0", 4), End("1.3.0", 4), ADDR),
        "warning",
        "the protocol is the same, but these versions are not tested together",
        "pip install 'hubring==1.3.0' here",
    ),
    Case(
        server.judge_clocks(Offset(2_000_000, 400_000), ADDR),
        "ok",
        "is +2 ms from this machine (error 0.2 ms",
    ),
    Case(
        server.judge_clocks(Offset(90 * SECOND, 400_000), ADDR),
        "warning",
        "the clock of hub1:5555 is 90.0 s ahead of this machine's clock (round trip 0.4 ms)",
        "chronyc makestep",
    ),
    Case(
        server.judge_clocks(Offset(-3 * SECOND, 0), ADDR),
        "warning",
        "is 3.0 s behind this machine's clock",
        "timedatectl",
    ),
    Case(server.judge_clocks(Offset(3 * SECOND, 5 * SECOND), ADDR), "ok", "error 2.5e+03 ms"),
]


@judgements(CASES)
def test_what_is_found_has_its_message_and_its_fix(case: Case) -> None:
    case.check()


def test_a_server_without_tls_is_fixed_with_insecure_and_not_with_another_port() -> None:
    with serving(None) as address:
        finding = server.judge_silence("no server with TLS answers", probe(address))
    assert finding.found.endswith("uses gRPC without TLS, as ps-server does with --insecure")
    assert finding.fix == "if you trust the network, pass --insecure here too"

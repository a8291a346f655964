"""The server and the user's own certificate: what the doctor says of them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from hubring.ps.config.declaration import NO_FILES, TlsFiles
from hubring.ps.config.server import ServerConfig
from hubring.ps.core.timing import ClockOffset
from hubring.ps.core.types import PROTOCOL
from hubring.ps.doctor import network
from hubring.ps.doctor.check import Finding, Subject
from tests.ps.doctor.case import Case, fails, fine, judgements, only, warns
from tests.support.certificates import SERVES, Authority
from tests.support.transports.impostor import listening

ADDR = "hub1:5555"
SECOND = 10**9
PATIENCE = 60.0


def versions(version: str | None, protocol: int | None) -> Finding:
    return network.judge_versions("1.2.0", version, protocol, ADDR)


def clocks(ahead: int, round_trip: int) -> Finding:
    return network.judge_clocks(ClockOffset(ahead, round_trip), ADDR)


CASES = [
    fails(
        network.judge_silence(ADDR, "none answers", "no process listens on that port"),
        "none answers: no process listens",
        "start --port 5555 --host 0.0.0.0, or use the address in the banner",
    ),
    fails(network.judge_refusal(ADDR, "UNIMPLEMENTED", "?"), "(UNIMPLEMENTED: ?)", "the control port"),
    fails(versions("2.0.0", PROTOCOL + 1), "at hub1:5555: the server refuses", "hubring==2.0.0"),
    fails(versions(None, None), "version unknown (protocol unknown)", "pip install 'hubring==VERSION' here"),
    warns(versions("1.3.0", PROTOCOL), "these versions are not tested together", "hubring==1.3.0"),
    warns(clocks(90 * SECOND, 400_000), "90.0 s ahead of this machine's clock (round trip 0.4", "chronyc"),
    warns(clocks(-3 * SECOND, 0), "is 3.0 s behind this machine's clock", "timedatectl"),
    fine(clocks(3 * SECOND, 5 * SECOND), "error 2.5e+03 ms"),
]


@judgements(CASES)
def test_each_finding_has_its_message_and_its_fix(case: Case) -> None:
    case.check()


def examined(address: str, *, insecure: bool = True) -> dict[str, Finding]:
    """What is found there, by name."""
    config = ServerConfig(insecure=insecure)
    return {each.name: each for each in network.examine_server(address, config, PATIENCE)}


@pytest.mark.slow
def test_another_listener_is_named_instead_of_a_server() -> None:
    with listening(lambda line: line.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")) as address:
        told = examined(address, insecure=False)
        assert f"no ps-server answers at {address} (UNAVAILABLE): " in examined(address)["server"].found
    assert list(told) == ["server"]
    assert "the process on that port is not ps-server" in told["server"].found


def test_an_address_where_nothing_listens_is_told_with_exit_code_69() -> None:
    (told,) = network.examine_server("127.0.0.1:9", ServerConfig(), 1.0)
    assert told.found.endswith("answers at 127.0.0.1:9: no process listens on that port")
    assert told.exit_code == 69


def test_another_grpc_server_is_told_from_ours() -> None:
    with serving(None) as address:
        told = examined(address, insecure=False)["server"]
        assert "does not answer as a ps-server does (UNIMPLEMENTED" in examined(address)["server"].found
    assert told.found.endswith("uses gRPC without TLS, as ps-server does with --insecure")
    assert told.fix == "if you trust the network, pass --insecure here too"


def test_a_server_of_another_protocol_is_a_failure_of_this_machine() -> None:
    with serving({"version": "9.9.9", "protocol": PROTOCOL + 1, "job": "", "state": "waiting"}) as address:
        told = examined(address)
    assert (told["versions"].state, told["versions"].exit_code) == ("failure", 78)
    assert f"9.9.9 (protocol {PROTOCOL + 1}) at {address}" in told["versions"].found


def test_a_server_whose_clock_is_off_is_a_warning() -> None:
    hour = 3600 * 10**9
    with serving({"version": "9.9.9", "protocol": PROTOCOL, "job": "", "state": "waiting"}, -hour) as address:
        told = examined(address)
    assert [each.state for each in told.values()] == ["ok", "warning", "warning"]
    assert "behind this machine's" in told["clocks"].found


class OtherServer(ControlServicer):
    """Answers what a doctor asks; anything else is left unimplemented."""

    def __init__(self, report: dict[str, Any], ahead: int) -> None:
        self._report = report
        self._ahead = ahead

    def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:  # noqa: N802 - gRPC's name
        return pb.StatusReply(json=json.dumps(self._report))

    def Clock(self, request: pb.ClockRequest, context: Any) -> pb.ClockReply:  # noqa: N802 - gRPC's name
        return pb.ClockReply(time_ns=time.time_ns() + self._ahead)


@contextlib.contextmanager
def serving(report: dict[str, Any] | None, ahead: int = 0) -> Iterator[str]:
    """A gRPC server with this report, or with no service at all."""
    server = grpc.server(ThreadPoolExecutor(4))
    if report is not None:
        add_ControlServicer_to_server(OtherServer(report, ahead), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def subject(files: TlsFiles, server: str | None = None) -> Subject:
    config = ServerConfig(tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca)
    return Subject(config, None, server, {}, 20.0)


def test_no_certificate_is_not_examined() -> None:
    assert only(network.examine_certificate(subject(NO_FILES))).state == "skipped"


def test_a_certificate_is_examined_for_a_server_or_for_a_client(tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours")
    good = ours.sign("host", "node1", "192.0.2.1", days=50)
    of_server = ours.sign("server", "node1", days=50, uses=[SERVES])

    def told_of(files: TlsFiles, address: str | None = None) -> Finding:
        return only(network.examine_certificate(subject(files, address)))

    for case in (
        fine(told_of(good), "for node1, 192.0.2.1, host, is valid"),
        fine(told_of(of_server._replace(ca=None)), "for node1"),
        fails(told_of(of_server, "node1:5555"), "purpose", "clientAuth"),
        fine(told_of(TlsFiles(ca=ours.file), "node1:5555"), "of an authority"),
        fails(told_of(ours.sign("old", "node1", days=-1)), "certificate has expired", "renew it"),
    ):
        case.check()
    for days, mode, words, fix in (
        (3, 0o640, "expires in 3.0 days", "renew it"),
        (50, 0o644, "all users of this host can read the private key", "chmod 600"),
    ):
        files = ours.sign(f"of-{days}", "node1", days=days)
        assert files.key is not None
        files.key.chmod(mode)
        *_, told = network.examine_certificate(subject(files))
        warns(told, words, fix).check()

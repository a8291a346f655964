"""The user's own certificate: what the doctor says of it."""

from __future__ import annotations

from pathlib import Path

from hubring.ps.config.server import ServerConfig
from hubring.ps.config.tls import NO_FILES, TlsFiles
from hubring.ps.doctor import certificate
from hubring.ps.doctor.subject import Subject
from tests.ps.doctor.case import Case, judgements, only
from tests.support.certificates import SERVES, Authority

FILE, KEY, ENDS = Path("/tls/node1.pem"), Path("/tls/node1.key"), "Jan  1 00:00:00 2030 GMT"
END = 1893456000.0
DAY = 86400.0

OPEN = certificate.judge_mode(KEY, 0o644)
assert OPEN is not None

CASES = [
    Case(
        certificate.judge_validity(FILE, "node1", ENDS, END - 90 * DAY),
        "ok",
        f"/tls/node1.pem, for node1, is valid until {ENDS}",
    ),
    Case(
        certificate.judge_validity(FILE, "node1", ENDS, END - 3 * DAY),
        "warning",
        f"/tls/node1.pem, for node1, expires in 3.0 days ({ENDS})",
        "renew it",
    ),
    Case(OPEN, "warning", "all users of this host can read the private key in /tls/node1.key", "chmod 600"),
]


@judgements(CASES)
def test_judgement(case: Case) -> None:
    case.check()


def subject(files: TlsFiles, server: str | None = None) -> Subject:
    config = ServerConfig(tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca)
    return Subject(config, None, server, {}, 20.0)


def test_no_certificate_is_not_examined() -> None:
    assert only(certificate.examine(subject(NO_FILES))).state == "skipped"


def test_only_its_group_may_read_the_key() -> None:
    assert certificate.judge_mode(KEY, 0o640) is None


def test_a_certificate_is_examined_for_a_server_or_for_a_client(tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours")
    good, of_server = (
        ours.sign("host", "node1", "192.0.2.1", days=50),
        ours.sign("server", "node1", days=50, uses=[SERVES]),
    )
    Case(only(certificate.examine(subject(good))), "ok", "for node1, 192.0.2.1, host, is valid").check()
    Case(only(certificate.examine(subject(of_server._replace(ca=None)))), "ok", "for node1").check()
    Case(
        only(certificate.examine(subject(of_server, "node1:5555"))), "failure", "purpose", "clientAuth"
    ).check()
    Case(
        only(certificate.examine(subject(TlsFiles(ca=ours.file), "node1:5555"))), "ok", "of an authority"
    ).check()
    expired = ours.sign("old", "node1", days=-1)
    Case(
        only(certificate.examine(subject(expired))), "failure", "certificate has expired", "renew it"
    ).check()

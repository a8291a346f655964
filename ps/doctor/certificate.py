"""The certificate of the user's own: whether it works, for whom it is, and until when."""

from __future__ import annotations

import ssl
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from hubring.ps.core.errors import ConfigError
from hubring.ps.doctor.finding import Finding, failure, ok, skipped, warning
from hubring.ps.doctor.subject import Subject

NAME = "certificate"

SOON_SECONDS = 14 * 86400.0
"""A certificate that ends within this time is a warning: a job may outlive it."""


def judge_validity(file: Path, names: str, ends: str, now: float) -> Finding:
    """Judges for how long a certificate is valid.

    Args:
        file: The certificate.
        names: The names in it.
        ends: The end, as `ssl.SSLSocket.getpeercert` writes it.
        now: The time, in seconds since the epoch.
    """
    left = ssl.cert_time_to_seconds(ends) - now
    if left < SOON_SECONDS:
        return warning(
            NAME,
            f"{file}, for {names}, expires in {left / 86400:.1f} days ({ends})",
            "renew it before long jobs",
        )
    return ok(NAME, f"{file}, for {names}, is valid until {ends}")


def judge_mode(key: Path, mode: int) -> Finding | None:
    """Judges who can read a private key; None if only its user and group can."""
    if not mode & stat.S_IRWXO:
        return None
    return warning(NAME, f"all users of this host can read the private key in {key}", f"chmod 600 {key}")


def examine(subject: Subject) -> Iterator[Finding]:
    """Reads the files, and runs a handshake of the certificate with itself."""
    from hubring.ps.security.certificate import names_in
    from hubring.ps.security.own_certificate import load

    files = subject.config.tls
    if not files:
        yield skipped(NAME, "not set (--tls-cert, --tls-ca): the server makes one, and its token proves it")
        return
    try:
        own = load(files, serves=subject.server is None and files.cert is not None)
    except ConfigError as error:
        found, _, fix = str(error).partition("; ")
        yield failure(NAME, found, fix or "check the files")
        return
    if files.cert is None or files.key is None:
        yield ok(NAME, f"{files.ca} has the certificates of an authority")
        return
    names = ", ".join(names_in(own.subject))
    yield judge_validity(files.cert, names, own.subject["notAfter"], time.time())
    if (finding := judge_mode(files.key, files.key.stat().st_mode)) is not None:
        yield finding

"""Names of hosts: what this machine's own stands for, and whether the server's stands for anything."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hubring.ps.config.address import is_loopback
from hubring.ps.core.errors import ServerUnreachable
from hubring.ps.doctor.finding import Finding, failure, ok, warning

OWN = "own name"
SERVER = "server's name"
SLOW_SECONDS = 1.0


class Answer(NamedTuple):
    """What a name was found to stand for.

    Attributes:
        name: That was asked for.
        addresses: Of the host; none: why says why.
        why: What the resolver said instead.
        seconds: That it took.
    """

    name: str
    addresses: Sequence[str]
    why: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.name} is {', '.join(self.addresses)}" if self.addresses else f"{self.name}: {self.why}"


def judge_own(answer: Answer, strange: Sequence[str], address: str) -> Finding:
    """Whether others find this machine by its name.

    Args:
        answer: What its name stands for.
        strange: Those addresses among them that are not this machine's.
        address: By which others reach it.
    """
    line = f"echo '{address} {answer.name}' >> /etc/hosts"
    if not answer.addresses:
        return warning(OWN, f"{answer}: who is told this name finds no machine", f"{line}, on all machines")
    if strange:
        return failure(
            OWN,
            f"{answer}; {', '.join(strange)} is no address of this machine: who dials the name gets another",
            f"correct /etc/hosts or the DNS: {answer.name} is {address}; or ps-server start --host {address}"
            " --insecure",
        )
    if all(map(is_loopback, answer.addresses)) and not is_loopback(address):
        return warning(
            OWN,
            f"{answer}, which only this machine reaches: --host {answer.name} listens for nobody else, and"
            " groups that scripts open by Gloo offer it to the others",
            f"in /etc/hosts let {answer.name} be {address}; or ps-server start --host {address} --insecure",
        )
    return _slow(OWN, answer) or ok(OWN, str(answer))


def judge_server(answer: Answer, here: bool) -> Finding:
    """Whether the server's name leads anywhere.

    Args:
        answer: What it stands for.
        here: Whether the name is this machine's own.
    """
    if not answer.addresses:
        return failure(
            SERVER,
            f"{answer}",
            "check its spelling; else a line in /etc/hosts, or the server's address in place of its name",
            ServerUnreachable.exit_code,
        )
    if all(map(is_loopback, answer.addresses)) and not here and answer.name != "localhost":
        return warning(
            SERVER,
            f"{answer}, which is this machine and no other",
            "correct it in /etc/hosts, unless the server runs here",
        )
    if answer.name in answer.addresses:
        return ok(SERVER, f"{answer.name} is an address, and needs no name server")
    return _slow(SERVER, answer) or ok(SERVER, str(answer))


def examine_own(address: str) -> Iterator[Finding]:
    """Looks this machine's name up; `address` is that by which others reach it."""
    answer = look_up(socket.gethostname())
    yield judge_own(answer, [each for each in answer.addresses if not is_own(each)], address)


def examine_server(host: str) -> Iterator[Finding]:
    """Looks the server's name up."""
    answer = look_up(host)
    yield judge_server(answer, here=host == socket.gethostname() or is_loopback(host))


def look_up(name: str) -> Answer:
    """Asks the resolver, which may take its time."""
    began = time.monotonic()
    try:
        places = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return Answer(name, (), str(error), time.monotonic() - began)
    addresses = dict.fromkeys(str(place[4][0]) for place in places)
    return Answer(name, tuple(addresses), "", time.monotonic() - began)


def is_own(address: str) -> bool:
    """Whether this machine has the address: only then can something listen there."""
    family, kind, _, _, place = socket.getaddrinfo(
        address, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
    )[0]
    with socket.socket(family, kind) as probe:
        try:
            probe.bind(place)
        except OSError:
            return False
    return True


def _slow(name: str, answer: Answer) -> Finding | None:
    if answer.seconds < SLOW_SECONDS:
        return None
    return warning(
        name,
        f"{answer}, found only after {answer.seconds:.1f} s",
        "a name server in /etc/resolv.conf does not answer: take it out, or put the name into /etc/hosts",
    )

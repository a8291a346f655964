"""Network interfaces: the one that a ring takes, and whether those that the environment names exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hubring.ps.config.address import is_loopback
from hubring.ps.core.errors import ConfigError, ServerUnreachable
from hubring.ps.doctor.finding import Finding, failure, ok, warning
from hubring.ps.doctor.subject import Subject
from hubring.ps.transport.interface import addresses

NAME = "interfaces"
GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"


def judge(here: Mapping[str, str], ring: str, outside: str) -> Finding:
    """Where a ring's ranks meet, and how others see this machine.

    Args:
        here: Each interface's IPv4 address by its name.
        ring: This machine's address as a ring's other members dial it.
        outside: That from which it talks to the outside.
    """
    found = f"a ring meets on {_spell(here, ring)}"
    if is_loopback(ring) and not is_loopback(outside):
        found += f", for workers of this machine alone; to others it is {_spell(here, outside)}"
    return ok(NAME, found)


def judge_way(server: str, why: str) -> Finding:
    """There is none to the server."""
    mend = f"ip route get {server}; give this machine a network that leads there"
    return failure(NAME, why, mend, ServerUnreachable.exit_code)


def judge_named(here: Mapping[str, str], gloo: str | None, nccl: str | None) -> list[Finding]:
    """What the environment's names for Gloo and NCCL come to; nothing where they are right or not set."""
    shown = ", ".join(f"{name} {address}" for name, address in here.items() if address)
    best = next((name for name, address in here.items() if address and not is_loopback(address)), "lo")
    findings = []
    if gloo is not None and not gloo_takes(gloo, here):
        findings.append(
            warning(
                GLOO,
                f"{GLOO}={gloo!r} names an interface that is not here; there are {shown}. ps-worker's ring"
                " does not read it, but groups that scripts open fail by it",
                f"export {GLOO}={best}, or unset {GLOO}",
            )
        )
    if nccl is not None and not nccl_takes(nccl, here):
        findings.append(
            failure(
                NCCL,
                f"{NCCL}={nccl!r} leaves no interface; there are {shown}. --backend nccl fails by it",
                f"export {NCCL}={best}, or unset {NCCL}",
            )
        )
    return findings


def gloo_takes(told: str, here: Mapping[str, str]) -> bool:
    """Whether all interfaces exist that GLOO_SOCKET_IFNAME lists."""
    return all(name in here for name in told.split(","))


def nccl_takes(told: str, here: Mapping[str, str]) -> list[str]:
    """Those of which NCCL chooses: it is told prefixes, after `=` whole names, after `^` what to leave."""
    without = told.startswith("^")
    exact = told.removeprefix("^").startswith("=")
    listed = told.removeprefix("^").removeprefix("=").split(",")

    def names(name: str) -> bool:
        return any(name == each if exact else name.startswith(each) for each in listed)

    return [name for name in here if names(name) != without]


def examine(subject: Subject, outside: str) -> Iterator[Finding]:
    """Asks the kernel; `outside` is this machine's address on the way to the outside."""
    here = addresses()
    try:
        yield judge(here, subject.ring_address, outside)
    except ConfigError as error:
        yield judge_way(subject.server_host, str(error))
    yield from judge_named(here, subject.variables.get(GLOO), subject.variables.get(NCCL))


def _spell(here: Mapping[str, str], address: str) -> str:
    name = next((name for name, own in here.items() if own == address), None)
    return f"{name} {address}" if name else address

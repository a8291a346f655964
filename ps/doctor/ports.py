"""The ports on which a server would listen here: free, or whose."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from typing import NamedTuple

from hubring.ps.config.server import ServerConfig
from hubring.ps.core.errors import ConfigError
from hubring.ps.doctor import listeners
from hubring.ps.doctor.finding import Finding, failure, ok, warning
from hubring.ps.doctor.listeners import Listener
from hubring.ps.transport.host import bracketed, numeric

UNPRIVILEGED = 1024
"""The first port that anybody may listen on, unless the kernel was told otherwise."""


class Port(NamedTuple):
    """One that a server would take.

    Attributes:
        name: What for.
        number: 0: a free one.
        flag: That chooses another.
    """

    name: str
    number: int
    flag: str


def wanted(config: ServerConfig) -> list[Port]:
    """Those of a server with these settings."""
    after = config.port + 1 if config.port else 0
    page = after if config.page_port is None else config.page_port
    control = Port("control port", config.port, "--port")
    return [control] if config.no_page else [control, Port("page's port", page, "--page-port")]


def judge(port: Port, host: str, refusal: int, listener: Listener | None) -> Finding:
    """Whether a server could listen there.

    Args:
        port: Which.
        host: Address to listen on.
        refusal: The errno with which the kernel refused it; 0: it did not.
        listener: Who has it.
    """
    where = f"{bracketed(host)}:{port.number}"
    if port.number == 0:
        return ok(port.name, "a free one will be taken")
    if refusal == 0:
        return ok(port.name, f"{where} is free")
    if refusal == errno.EADDRINUSE and listener is not None and listener.is_ours:
        return ok(port.name, f"a ps-server has {where}: {listener}; a second one needs {port.flag}")
    if refusal == errno.EADDRINUSE:
        who = listener or "a process in another network namespace, or one that is ending"
        return warning(
            port.name, f"{where} is taken by {who}", f"ps-server start {port.flag} 0, or stop that"
        )
    if refusal == errno.EACCES:
        found = f"{where} is for privileged programs"
        return failure(port.name, found, f"ps-server start {port.flag} N, with N from {UNPRIVILEGED} on")
    if refusal == errno.EADDRNOTAVAIL:
        found = f"{host} is no address of this machine"
        return failure(port.name, found, "ps-server start --host, with an address that ip addr shows")
    return failure(
        port.name,
        f"{where} cannot be had: {os.strerror(refusal)}",
        f"ps-server start {port.flag} 0, or --host",
    )


def examine(config: ServerConfig) -> Iterator[Finding]:
    """Tries to listen on each for an instant."""
    for port in wanted(config):
        refusal = refused(config.host, port.number)
        yield judge(port, config.host, refusal, listeners.find(port.number) if refusal else None)


def refused(host: str, port: int) -> int:
    """The errno with which the kernel refuses a listener there; 0 if it does not."""
    try:
        place = numeric(host)
    except ConfigError:
        return errno.EADDRNOTAVAIL
    with socket.socket(socket.AF_INET6 if ":" in place else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((place, port))
            probe.listen()
        except OSError as error:
            return error.errno or errno.EIO
    return 0

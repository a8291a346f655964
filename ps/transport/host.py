"""Which host this is, as others must see it to reach it."""

from __future__ import annotations

import errno
import os
import socket
import uuid
from pathlib import Path

from hubring.ps.core.errors import ConfigError

_ANY = {"", "0.0.0.0", "::", "*"}  # noqa: S104 - compared, not bound
_ELSEWHERE = "192.0.2.1"  # TEST-NET-1 (RFC 5737): nobody lives there, and nothing is sent
_DISCARD = 9
_NOWHERE = uuid.uuid4().hex


def host_id() -> str:
    """Equal for two processes only where they can reach each other's shared memory.

    That takes one kernel (its boot id), one namespace of abstract sockets (the
    network's) and one user. Where the kernel does not tell, no two are equal.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return _NOWHERE
    return f"{boot}/{network}/{os.getuid()}"


def reachable(host: str) -> str:
    """The name under which others dial a listener that was bound to `host`.

    A wildcard becomes the address from which this machine talks to the outside;
    without any route, its own name.
    """
    if host not in _ANY:
        return host
    try:
        return _own_address(_ELSEWHERE)
    except OSError:
        return socket.gethostname()


def towards(host: str) -> str:
    """This machine's address on the way to `host`, which is how `host` and its neighbours reach it.

    Raises:
        ConfigError: There is no way to that host.
    """
    try:
        return _own_address(host)
    except OSError as error:
        raise ConfigError(
            f"no address of this machine leads to {host!r} ({error}); check its name"
        ) from error


def _own_address(peer: str) -> str:
    family, kind, _, _, place = socket.getaddrinfo(peer, _DISCARD, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # a datagram socket sends nothing by it
        return str(probe.getsockname()[0])


def local(host: str) -> str:
    """The name under which this machine itself dials a listener that was bound to `host`."""
    if host not in _ANY:
        return host
    return "::1" if host == "::" else "127.0.0.1"


def numeric(host: str) -> str:
    """The address that a host's name stands for; ZeroMQ binds to nothing else.

    Raises:
        ConfigError: The name stands for none.
    """
    if host in _ANY:
        return "::" if host == "::" else "0.0.0.0"  # noqa: S104 - asked for
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"{host!r} is the name of no host ({error}); check --host") from error


def refusal(host: str, port: int) -> int:
    """The errno with which the kernel refuses a listener there; 0: it does not."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        with socket.socket(family, kind) as trial:
            # As servers do it: a connection that only lingers there is in nobody's way.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(place)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def objection(host: str, port: int) -> str:
    """Why nothing can listen there, in the kernel's words; empty if something can."""
    code = refusal(host, port)
    if code in (0, errno.EAFNOSUPPORT):  # no IPv6 here, and "::" may still mean all of IPv4
        return ""
    return f"{os.strerror(code)} ({errno.errorcode.get(code, 'no code')})"


def bracketed(host: str) -> str:
    """A host as it stands before a colon and a port."""
    return f"[{host}]" if ":" in host else host

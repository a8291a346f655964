"""This host's identity and addresses, and what listens at an address where no server answers."""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import socket
import ssl
import stat
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hubring.protos import control_pb2 as pb
from hubring.ps.config.values import address as split
from hubring.ps.config.values import is_loopback
from hubring.ps.core.errors import ConfigError
from hubring.ps.security.access import NO_KEY_NEEDED, ShardKey
from hubring.ps.security.certificate import Identity
from hubring.ps.security.token_file import is_ours


def interface_addresses() -> dict[str, str]:
    """Returns each interface's IPv4 address by its name; empty if it has none."""
    import psutil  # takes about 20 ms to import

    known = psutil.net_if_addrs()  # omits interfaces without any address
    return {
        name: next((each.address for each in known.get(name, ()) if each.family == socket.AF_INET), "")
        for _, name in socket.if_nameindex()
    }


_ANY = {"", "0.0.0.0", "::", "*"}  # noqa: S104 - compared, not bound
_OUTSIDE = "192.0.2.1"  # TEST-NET-1 (RFC 5737): has no hosts, and nothing is sent
_DISCARD = 9
_UNIQUE = uuid.uuid4().hex


def host_id() -> str:
    """Returns an id that two processes share only if they can reach each other's shared memory.

    They must have the same kernel (boot id), network namespace (for abstract sockets) and
    user. If the kernel's id is unknown, no two processes have equal ids.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return _UNIQUE
    return f"{boot}/{network}/{os.getuid()}"


UNIX = "-unix"
"""Suffix of a transport's name for the address of its unix socket."""


class ShardAddress(NamedTuple):
    """A shard's host (`host_id`), its address for each transport, and what lets a worker in."""

    host_id: str
    addresses: Mapping[str, str]
    key: ShardKey = NO_KEY_NEEDED

    @classmethod
    def from_proto(cls, message: pb.ShardAddress, identity: Identity | None) -> ShardAddress:
        """Returns the address in a message, for a program with this certificate of its own."""
        return cls(message.host_id, dict(message.addresses), ShardKey.from_proto(message.door, identity))

    @property
    def by_tcp(self) -> ShardAddress:
        """The address without unix sockets."""
        kept = {name: each for name, each in self.addresses.items() if not name.endswith(UNIX)}
        return self._replace(addresses=kept)

    def way(self, transport: str) -> tuple[str, ShardKey]:
        """Returns a transport's address for this process, and its key; on its host those of a unix socket."""
        near = self.addresses.get(f"{transport}{UNIX}", "")
        if self.host_id == host_id() and is_ours(near.partition(":")[2]):
            return near, self.key.near
        return self.addresses[transport], self.key


def reachable(host: str) -> str:
    """Returns the address that other hosts use for a listener bound to `host`.

    A wildcard becomes this machine's address on the default route, or without a route
    its host name.
    """
    if host not in _ANY:
        return host
    try:
        return _own_address(_OUTSIDE)
    except OSError:
        return socket.gethostname()


def towards(host: str) -> str:
    """Returns this machine's address on the route to `host`, which `host` and its neighbours can reach.

    Raises:
        ConfigError: There is no route to that host.
    """
    try:
        return _own_address(host)
    except OSError as error:
        raise ConfigError(f"no route from this machine to {host!r} ({error}); check the host name") from error


def _own_address(peer: str) -> str:
    family, kind, _, _, place = socket.getaddrinfo(peer, _DISCARD, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # connecting a datagram socket sends nothing
        return str(probe.getsockname()[0])


def local(host: str) -> str:
    """Returns the address that this machine uses for a listener bound to `host`."""
    if host not in _ANY:
        return host
    return "::1" if host == "::" else "127.0.0.1"


def numeric(host: str) -> str:
    """Returns the IP address of a host name. ZeroMQ binds only to IP addresses.

    Raises:
        ConfigError: The name cannot be resolved.
    """
    if host in _ANY:
        return "::" if host == "::" else "0.0.0.0"  # noqa: S104 - the caller's choice
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"cannot resolve the host name {host!r} ({error}); check --host") from error


def refusal(host: str, port: int) -> int:
    """Returns the errno with which the kernel refuses a listener there, or 0."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        with socket.socket(family, kind) as trial:
            # As servers do: connections in TIME_WAIT must not block the port.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(place)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def objection(host: str, port: int) -> str:
    """Returns the kernel's error for a listener there, or an empty string."""
    code = refusal(host, port)
    if code in (0, errno.EAFNOSUPPORT):  # without IPv6, "::" may still mean all of IPv4
        return ""
    return f"{os.strerror(code)} ({errno.errorcode.get(code, 'no code')})"


def bracketed(host: str) -> str:
    """Returns a host as written before a colon and a port."""
    return f"[{host}]" if ":" in host else host


def network_of(address: str) -> str:
    """Returns the part of a peer's IP address that the peer cannot choose: of IPv6 the first 64 bits."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))


def duplicate(number: int) -> socket.socket:
    """Returns a descriptor of our own for a socket that a library may close at any time.

    Raises:
        OSError: The connection has ended, or no descriptor is free.
    """
    if not stat.S_ISSOCK(
        os.fstat(number).st_mode
    ):  # the end of a file's copy unlocks the file (fcntl_locking(2))
        raise OSError(errno.ENOTSOCK, "not a socket")
    return socket.socket(fileno=os.dup(number))


_LIBC = ctypes.CDLL(None)
_UNSPECIFIED = (ctypes.c_ubyte * 16)()  # a sockaddr of AF_UNSPEC


def reset(line: socket.socket) -> None:
    """Ends a connection, and frees what the kernel has received, which is still read after `shutdown`."""
    _LIBC.connect(line.fileno(), _UNSPECIFIED, len(_UNSPECIFIED))  # connect(2) of AF_UNSPEC


def release_freed_memory() -> None:
    """Returns freed memory to the kernel, as far as the C library can."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


SECONDS = 0.5
"""Seconds for each attempt. The caller has already waited long."""
_SETTINGS = b"\x04"
"""The type of the frame with which a server begins HTTP/2 (RFC 9113, 6.5), after three bytes of length."""


def start_command(address: str) -> str:
    """Returns the command that starts a server on the host of an address, where others find it."""
    host, port = split(address)
    return f"ps-server start --port {port}{'' if is_loopback(host) else ' --host 0.0.0.0'}"


def probe(address: str) -> str:
    """Returns a clause about what listens at `HOST:PORT`."""
    place = split(address)
    try:
        if _speaks_tls(place):
            return "the process on that port uses TLS, but is not a ps-server, or is too busy to answer"
        return _describe(_answer_to_http(place))
    except socket.gaierror as error:
        return f"cannot resolve the host name {place[0]!r} ({error.strerror})"
    except ConnectionRefusedError:
        return "no process listens on that port"
    except TimeoutError:
        return "the host does not answer; it is down or a firewall blocks it"
    except OSError as error:
        return f"the host is unreachable ({error.strerror or error})"


def _speaks_tls(place: tuple[str, int]) -> bool:
    """Whether the server takes part in a TLS handshake, even if it refuses with an alert."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # no data is sent
    with socket.create_connection(place, SECONDS) as connection:
        try:
            context.wrap_socket(connection).close()
        except OSError as error:
            return "ALERT" in str(error)  # otherwise it closes the connection, or does not answer
    return True


def _answer_to_http(place: tuple[str, int]) -> bytes | None:
    """Returns the first bytes of the answer to a plain HTTP request.

    Returns None if there is no answer and the connection stays open.
    """
    with socket.create_connection(place, SECONDS) as connection:
        try:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return connection.recv(5)
        except TimeoutError:
            return None
        except OSError:  # it closes the connection
            return b""


def _describe(answer: bytes | None) -> str:
    if answer is None:
        return "the process on that port does not answer; it is stopped or is not ps-server"
    if answer[3:4] == _SETTINGS:
        return (
            "the process on that port uses gRPC without TLS, as ps-server does with --insecure; if you trust"
            " the network, pass --insecure here too"
        )
    if answer == b"HTTP/":
        return "a web server listens on that port; workers do not use the port of the status page"
    return "the process on that port is not ps-server"

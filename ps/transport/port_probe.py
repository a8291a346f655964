"""Finds out what listens at an address where no server answers, for the error message."""

from __future__ import annotations

import socket
import ssl

from hubring.ps.config.address import address as split

SECONDS = 0.5
"""Seconds for each attempt. The caller has already waited long."""
_SETTINGS = b"\x04"
"""The type of the frame with which a server begins HTTP/2 (RFC 9113, 6.5), after three bytes of length."""


def probe(address: str) -> str:
    """Returns a clause about what listens at `HOST:PORT`."""
    place = split(address)
    try:
        if _speaks_tls(place):
            return "the process on that port uses TLS, but is not a ps-server"
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
        except ssl.SSLError as error:
            return "ALERT" in (error.reason or "")
        except OSError:  # it closes the connection, or does not answer
            return False
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

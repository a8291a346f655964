"""Probe: what is found at an address where no server answers, for the sentence that says why."""

from __future__ import annotations

import socket
import ssl

from hubring.ps.config.address import address as split

SECONDS = 0.5
"""For each thing that is tried: whoever asks has waited long already."""


def probe(address: str) -> str:
    """A clause on who or what is at `HOST:PORT`."""
    place = split(address)
    try:
        if _speaks_tls(place):
            return "what listens there speaks TLS, and our programs speak plain gRPC"
        return _judged(_answer_to_http(place))
    except socket.gaierror as error:
        return f"no host is called {place[0]!r} ({error.strerror})"
    except ConnectionRefusedError:
        return "nobody listens on that port"
    except TimeoutError:
        return "the host does not answer: it is down, or a firewall is between"
    except OSError as error:
        return f"it cannot be reached ({error.strerror or error})"


def _speaks_tls(place: tuple[str, int]) -> bool:
    """Whether it takes part in a TLS handshake, be it to refuse it by an alert."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing will be sent
    with socket.create_connection(place, SECONDS) as line:
        try:
            context.wrap_socket(line).close()
        except ssl.SSLError as error:
            return "ALERT" in (error.reason or "")
        except OSError:  # it hangs up, or says nothing
            return False
    return True


def _answer_to_http(place: tuple[str, int]) -> bytes | None:
    """The beginning of what it says to a plain request; None: nothing, though the line stays open."""
    with socket.create_connection(place, SECONDS) as line:
        try:
            line.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return line.recv(5)
        except TimeoutError:
            return None
        except OSError:  # it hangs up
            return b""


def _judged(answer: bytes | None) -> str:
    if answer is None:
        return "what listens there says nothing: it was stopped, or is no ps-server"
    if answer == b"HTTP/":
        return "what listens there speaks HTTP, as the status page does, whose port is not the workers'"
    return "what listens there is no ps-server"

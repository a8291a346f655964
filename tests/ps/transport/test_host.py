"""Whether something could listen at a place, before a server tries."""

from __future__ import annotations

import errno
import socket
from unittest.mock import Mock

import pytest

from hubring.ps.transport.host import objection


def test_a_port_on_which_a_connection_only_lingers_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            here, _ = server.accept()
            here.close()  # who closes first lingers
            assert client.recv(1) == b""
    with socket.socket() as strict, pytest.raises(OSError, match="in use"):
        strict.bind(("127.0.0.1", port))
    assert objection("127.0.0.1", port) == ""


def test_where_there_is_no_ipv6_the_server_may_try(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
    monkeypatch.setattr(socket, "socket", Mock(side_effect=refusal))
    assert objection("::", 5555) == ""

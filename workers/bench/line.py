"""The protocol between the bench and its members: lines of text over a Unix socket.

Standard input does not work, since `mpirun` forwards it only to one rank. A process that waits for a line is
blocked, so that a row takes no CPU time during the turns of other rows.
"""

from __future__ import annotations

import socket
from pathlib import Path

from hubring.ps.core.errors import ConnectionLost, DeadlineExceeded


class Line:
    """One end of a connection; owns the socket."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._reader = connected.makefile("r", encoding="utf-8", newline="\n")

    @classmethod
    def dial(cls, path: Path) -> Line:
        """Connects to the socket at `path`."""
        dialled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        dialled.connect(str(path))
        return cls(dialled)

    def tell(self, text: str) -> None:
        """Sends one line.

        Raises:
            ConnectionLost: The other end has closed.
        """
        try:
            self._socket.sendall(f"{text}\n".encode())
        except (BrokenPipeError, ConnectionResetError) as cause:
            raise ConnectionLost("the other end of the socket is closed") from cause

    def hear(self, timeout: float | None = None) -> str:
        """Waits for the next line, and returns it.

        Raises:
            ConnectionLost: The other end has closed.
            DeadlineExceeded: No line arrived within `timeout` seconds. Do not use the object after that.
        """
        self._socket.settimeout(timeout)
        try:
            line = self._reader.readline()
            self._socket.settimeout(None)
        except TimeoutError as cause:
            raise DeadlineExceeded(f"a member did not answer within {timeout:g} s (--timeout)") from cause
        except ConnectionResetError:
            line = ""
        if not line:
            raise ConnectionLost("the other end of the socket is closed")
        return line.rstrip("\n")

    def close(self) -> None:
        """Closes the connection."""
        self._reader.close()
        self._socket.close()

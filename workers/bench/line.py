"""What the bench and its members say to each other: lines of text over a Unix socket.

A socket rather than standard input, since `mpirun` keeps the latter of all ranks
but one for itself. Whoever waits for a line is blocked, so that a row whose turn
it is not takes no time from the others.
"""

from __future__ import annotations

import socket
from pathlib import Path

from hubring.ps.core.errors import ConnectionLost, DeadlineExceeded


class Line:
    """One end of a conversation; owns the socket."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._reader = connected.makefile("r", encoding="utf-8", newline="\n")

    @classmethod
    def dial(cls, path: Path) -> Line:
        """Connects to whoever listens at `path`."""
        dialled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        dialled.connect(str(path))
        return cls(dialled)

    def tell(self, text: str) -> None:
        """Sends one line.

        Raises:
            ConnectionLost: Nobody is there any more.
        """
        try:
            self._socket.sendall(f"{text}\n".encode())
        except (BrokenPipeError, ConnectionResetError) as cause:
            raise ConnectionLost("the other end has closed the line") from cause

    def hear(self, timeout: float | None = None) -> str:
        """The next line, waited for.

        Raises:
            ConnectionLost: The other end has closed.
            DeadlineExceeded: None came within `timeout` seconds; the line is of no use after that.
        """
        self._socket.settimeout(timeout)
        try:
            line = self._reader.readline()
            self._socket.settimeout(None)
        except TimeoutError as cause:
            raise DeadlineExceeded(f"no answer within {timeout:g} s (--timeout)") from cause
        except ConnectionResetError:
            line = ""
        if not line:
            raise ConnectionLost("the other end has closed the line")
        return line.rstrip("\n")

    def close(self) -> None:
        """Ends the conversation."""
        self._reader.close()
        self._socket.close()

"""Log output on standard error, one line per event, and its last lines for the status page.

    14:03:07 host w3 step=120 | WARNING: the slowest is rank 1, 4 steps behind

A line is written with one write, so that lines of processes that share a terminal do not mix. A program
calls `configure` once at startup and updates `who`. All other code uses only
`logging.getLogger(__name__)`.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, TextIO

from hubring.ps.config.values import LogFormat
from hubring.ps.core.standard_streams import is_terminal, kept

RED, YELLOW, PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[0m"


@dataclass(slots=True)
class LogOrigin:
    """The process that a line comes from."""

    role: str = ""
    """`w3`, `shard1` or `hub`."""
    step: int | None = None
    """Completed steps; None if the process counts no steps."""
    host: str = field(default_factory=lambda: socket.gethostname().partition(".")[0])

    def __str__(self) -> str:
        step = "" if self.step is None else f"step={self.step}"
        return " ".join(word for word in (self.host, self.role, step) if word)


who = LogOrigin()
"""The origin of this process's lines: its role and the step that it has reached.

It is global, as are the loggers that `configure` sets up.
"""

OURS = "hubring"
"""The logger above all of Hubring's."""


def configure(fmt: LogFormat = "text", stream: TextIO | None = None, logger: str = "") -> LogOrigin:
    """Sends log lines to `stream`, or to standard error. A second call replaces the first.

    Args:
        fmt: The format of a line.
        stream: Where the lines go.
        logger: Whose lines: of all loggers; in a process that runs a script `OURS` alone, so that the
            script's own loggers are as in plain Python.

    Returns:
        `who`, which the caller must fill in.
    """
    stream = stream or sys.stderr
    handler = LineHandler(stream)
    handler.setFormatter(JsonLine() if fmt == "json" else TextLine(colour=is_terminal(stream)))
    top = logging.getLogger(logger)
    for earlier in [known for known in top.handlers if isinstance(known, LineHandler)]:
        top.removeHandler(earlier)
        earlier.close()
    top.addHandler(handler)
    top.setLevel(logging.INFO)
    top.propagate = False  # a script's handlers would repeat each line
    return who


class LineHandler(logging.StreamHandler[TextIO]):
    """The handler that `configure` installs. The class distinguishes it from a training script's handlers.

    A script may close its standard error, so this handler has a copy. Where the script put an object in its
    place that fails, the line goes to the standard error that the process began with.
    """

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__(kept(stream))
        self._copied = self.stream is not stream

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + self.terminator
        except Exception:  # as in logging: an error in a message must not stop the caller
            self.handleError(record)
            return
        streams: tuple[Any, ...] = self.stream, sys.__stderr__
        for stream in streams:
            try:
                stream.write(line)
                stream.flush()
            except Exception:  # noqa: S112 - None, closed, or an object of the script
                continue
            return

    def close(self) -> None:
        super().close()
        if self._copied:
            self.stream.close()


class TextLine(logging.Formatter):
    """Lines for people: `14:03:07 host w3 step=120 | message`, with the level for warnings and errors."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__("%(message)s")
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        # A traceback has several lines; each gets time and origin. A peer's text may have lines that look
        # like lines of this log, so all but the first are indented.
        begin = f"{self.formatTime(record, '%H:%M:%S')} {who} | "
        lines = (self._level(record) + super().format(record)).splitlines() or [""]
        return begin + f"\n{begin}  ".join(lines)

    def _level(self, record: logging.LogRecord) -> str:
        if record.levelno < logging.WARNING:
            return ""
        name = record.levelname
        if self._colour:
            name = f"{RED if record.levelno >= logging.ERROR else YELLOW}{name}{PLAIN}"
        return f"{name}: "


class JsonLine(logging.Formatter):
    """Lines for programs: one JSON object each. `time` is in seconds since 1970."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "host": who.host,
            "role": who.role,
            "step": who.step,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


MAX_ENTRIES = 200
"""Entries to store. The oldest are dropped."""


class LogEntry(NamedTuple):
    """One line of the log."""

    number: int
    """Increases by one with each entry, from 1."""
    time: float
    """Seconds since 1970."""
    level: str
    """`info`, `warning` or `error`."""
    text: str


class Journal(logging.Handler):
    """Stores the last lines that this process logged at level INFO or above."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._entries: deque[LogEntry] = deque(maxlen=MAX_ENTRIES)
        self._numbers = count(1)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:  # a logging error must not stop the caller
            self.handleError(record)
            return
        self._entries.append(LogEntry(next(self._numbers), record.created, record.levelname.lower(), text))

    def entries(self) -> list[LogEntry]:
        """Returns the stored entries, oldest first."""
        return list(self._entries)

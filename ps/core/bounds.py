"""Bounds on what other processes open, send and ask for.

Law: strangers take descriptors too, so every kind of connection has a limit below that of the process.
The rest is left for files, shared memory and the connections of members.

Law: what `clean` returns has no control character that moves a cursor, changes a color or hides text, and
no more characters than the caller allows. Text enters this way where messages are received, once.

What a process refused is counted by reason, without filling its log.
"""

from __future__ import annotations

import errno
import logging
import re
import resource
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Literal

ENOUGH_DESCRIPTORS = 65_536
"""No process needs more: a shard of 1,024 workers has about 4,000 open."""

DESCRIPTOR_PAUSE_SECONDS = 0.1
"""How long a listener accepts no connection after the system had no descriptor for one."""

_OUT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_descriptor_limit() -> None:
    """Raises this process's soft limit as far as its hard limit allows, up to ENOUGH."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descriptor_limit() -> int:
    """Returns the number of descriptors that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def descriptor_share(wanted: int, parts: int) -> int:
    """Returns how many connections one kind may have: `wanted`, or one of `parts` of all descriptors."""
    return max(1, min(wanted, descriptor_limit() // parts))


def out_of_descriptors(error: OSError) -> bool:
    """Whether the system had no descriptor, or no memory for one, rather than the peer being at fault."""
    return error.errno in _OUT_OF


NAME_CHARACTERS = 200
"""Characters of a host, a job or another name."""

MESSAGE_CHARACTERS = 8_000
"""Characters of an error message, which may hold a traceback."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Stands for each character that was removed."""

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?|\x9b[0-?]*[ -/]*[@-~]?")
"""An ANSI escape sequence (ECMA-48): CSI, OSC, or another one of two characters."""


def clean_message(text: str) -> str:
    """Returns a peer's message, which keeps its line breaks and tabs."""
    return clean(text, MESSAGE_CHARACTERS, kept="\n\t")


def clean(text: str, most: int = NAME_CHARACTERS, *, kept: str = "") -> str:
    """Returns a name on one line.

    Args:
        text: From a peer.
        most: Maximum number of characters. Longer text ends with an ellipsis.
        kept: Control characters that stay.
    """
    cut = text if len(text) <= most else text[: most - 1] + "…"
    if cut.isprintable():  # almost all text
        return cut
    shown = _ESCAPE.sub(REPLACEMENT, cut)
    return "".join(each if each.isprintable() or each in kept else REPLACEMENT for each in shown)


RejectionReason = Literal[
    "token",
    "world size",
    "text",
    "model",
    "board",
    "path",
    "message",
    "damage",
    "frame",
    "header",
    "parts",
    "streams",
    "silent stream",
    "connections",
    "descriptors",
    "handshake",
    "slow reader",
]
"""What was too large, too many, or not allowed. The values of the metrics' label."""


class Rejections:
    """Counts since the process started. Any thread may add.

    Args:
        counts: The number of rejections by reason so far.
    """

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self._lock = threading.Lock()
        self._counts = Counter(counts)

    def add(self, reason: RejectionReason, log: logging.Logger, text: str) -> None:
        """Counts one rejection, and logs the 1st, 2nd, 4th, 8th and so on of its reason.

        Args:
            reason: What was refused.
            log: The logger of the module that refused it.
            text: Who sent what, and the limit.
        """
        with self._lock:
            self._counts[reason] += 1
            count = self._counts[reason]
        if count & (count - 1) == 0:
            log.warning("%s%s", text, f" ({count} times since the start)" if count > 1 else "")

    def counts(self) -> dict[str, int]:
        """Returns the number of rejections by reason; only reasons that occurred."""
        with self._lock:
            return dict(self._counts)

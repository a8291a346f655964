"""Text that another process sent, made safe for logs, terminals, pages and other processes.

Law: what `clean` returns has no control character that moves a cursor, changes a color or hides text, and no
more characters than the caller allows. Text enters this way where messages are received, once.
"""

from __future__ import annotations

import re

NAME = 200
"""Characters of a host, a job or another name."""

MESSAGE = 8_000
"""Characters of an error message, which may hold a traceback."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Stands for each character that was removed."""

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?|\x9b[0-?]*[ -/]*[@-~]?")
"""An ANSI escape sequence (ECMA-48): CSI, OSC, or another one of two characters."""


def clean(text: str, most: int = NAME) -> str:
    """Returns a name on one line.

    Args:
        text: From a peer.
        most: Maximum number of characters. Longer text ends with an ellipsis.
    """
    return _printable(text, most, "")


def clean_message(text: str, most: int = MESSAGE) -> str:
    """Returns a message, which keeps its line breaks and tabs.

    Args:
        text: From a peer.
        most: Maximum number of characters. Longer text ends with an ellipsis.
    """
    return _printable(text, most, "\n\t")


def _printable(text: str, most: int, kept: str) -> str:
    cut = text if len(text) <= most else text[: most - 1] + "…"
    if cut.isprintable():  # almost all text
        return cut
    shown = _ESCAPE.sub(REPLACEMENT, cut)
    return "".join(each if each.isprintable() or each in kept else REPLACEMENT for each in shown)

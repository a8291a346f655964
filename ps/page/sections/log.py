"""The section with the newest log lines."""

from __future__ import annotations

from datetime import UTC, datetime

from markupsafe import Markup

from hubring.ps.observe.journal import LogEntry
from hubring.ps.page.markup_cache import MarkupCache
from hubring.ps.page.section import TEMPLATES, Section
from hubring.ps.page.snapshot import Snapshot

SHOWN = 60
"""How many of the newest log lines the page shows."""

_MACROS = TEMPLATES.macros("log.html")
_FRAME = _MACROS.section()


def log(snapshot: Snapshot, cache: MarkupCache) -> Section:
    """Renders the log, newest line first."""
    newest = snapshot.entries[::-1][:SHOWN]
    rows = {f"entry-{each.number}": cache(f"entry-{each.number}", _row, each) for each in newest}
    return Section(_FRAME, rows)


def _row(entry: LogEntry) -> Markup:
    made: Markup = _MACROS.row(entry, datetime.fromtimestamp(entry.time, UTC))
    return made

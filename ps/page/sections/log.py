"""What happened lately: who came and went, what failed."""

from __future__ import annotations

from datetime import UTC, datetime

from hubring.ps.markup import Html, element
from hubring.ps.observe.journal import Entry
from hubring.ps.page.memo import Memo
from hubring.ps.page.moment import Moment
from hubring.ps.page.section import ROWS, Section
from hubring.ps.page.table import headed

SHOWN = 60
"""The newest of what is kept."""


def log(moment: Moment, memo: Memo) -> Section:
    """The newest line first."""
    newest = moment.entries[::-1][:SHOWN]
    rows = {f"entry-{each.number}": memo(f"entry-{each.number}", _line, each) for each in newest}
    lines = element("ol", ROWS, class_="log")
    box = element(
        "div", lines, id="log-lines", class_="scroll", role="region", aria_label="Log lines", tabindex=0
    )
    told = "Times are UTC; the newest line comes first."
    return Section(headed("log", "Log", element("p", told, class_="soft"), box), rows)


def _line(entry: Entry) -> Html:
    when = datetime.fromtimestamp(entry.time, UTC)
    time = element("time", f"{when:%H:%M:%S}", datetime=when.isoformat(timespec="milliseconds"))
    level = None if entry.level == "info" else element("strong", f"{entry.level}: ")
    return element("li", time, " ", level, entry.text, id=f"entry-{entry.number}", class_=entry.level)

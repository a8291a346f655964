"""The section with staleness: how many versions old the parameters of a gradient were when it was applied."""

from __future__ import annotations

from hubring.ps.page.kit.chart import bins
from hubring.ps.page.markup_cache import MarkupCache
from hubring.ps.page.section import TEMPLATES, Section
from hubring.ps.page.snapshot import Snapshot

_MACROS = TEMPLATES.macros("staleness.html")


def staleness(snapshot: Snapshot, cache: MarkupCache) -> Section:
    """Renders a histogram."""
    return Section(cache("staleness", _MACROS.section, bins(snapshot.staleness), snapshot.on_ring))

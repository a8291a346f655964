"""The section with the traffic and the usage of every shard."""

from __future__ import annotations

from hubring.ps.page.markup_cache import MarkupCache
from hubring.ps.page.section import TEMPLATES, Section
from hubring.ps.page.sections.workers import usage
from hubring.ps.page.snapshot import Snapshot

_MACROS = TEMPLATES.macros("shards.html")


def shards(snapshot: Snapshot, cache: MarkupCache) -> Section:
    """Renders one row per shard; a ring has none."""
    shown = () if snapshot.on_ring else snapshot.shards
    total = sum(each.bytes_in + each.bytes_out for each in shown) or 1
    rows = {}
    for each in shown:
        share = round((each.bytes_in + each.bytes_out) / total, 3)
        cells = usage(each.cores, each.memory, each.gpu)
        rows[f"shard-{each.index}"] = cache(f"shard-{each.index}", _MACROS.row, each, share, cells)
    return Section(cache("shards", _MACROS.section, bool(rows), snapshot.on_ring), rows)

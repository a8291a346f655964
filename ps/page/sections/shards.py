"""Every shard: what went through it."""

from __future__ import annotations

from hubring.ps.page.markup_cache import Memo
from hubring.ps.page.section import TEMPLATES, Section
from hubring.ps.page.snapshot import Moment

_MACROS = TEMPLATES.macros("shards.html")


def shards(moment: Moment, memo: Memo) -> Section:
    """One row a shard; a ring has none."""
    told = () if moment.on_ring else moment.shards
    total = sum(each.bytes_in + each.bytes_out for each in told) or 1
    rows = {}
    for each in told:
        share = round((each.bytes_in + each.bytes_out) / total, 3)
        rows[f"shard-{each.index}"] = memo(f"shard-{each.index}", _MACROS.row, each, share)
    return Section(memo("shards", _MACROS.section, bool(rows), moment.on_ring), rows)

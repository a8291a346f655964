"""Every shard: what went through it."""

from __future__ import annotations

from hubring.ps.markup import Html, element, together
from hubring.ps.page.chart import bar
from hubring.ps.page.figures import size
from hubring.ps.page.memo import Memo
from hubring.ps.page.moment import Moment, Shard
from hubring.ps.page.section import Section
from hubring.ps.page.table import headed, row, table

HEADS = ("Shard", "In", "Out", "A second", "Share of all bytes", "Pushes", "Too late", "Versions", "Process")


def shards(moment: Moment, memo: Memo) -> Section:
    """One row a shard; a ring has none."""
    if moment.on_ring:
        words = (
            "Around the ring workers exchange with each other, and nobody counts what goes over their links."
        )
        return Section(headed("shards", "Bytes per shard", element("p", words, class_="soft")))
    if not moment.shards:
        words = "No shard has told of itself yet."
        return Section(headed("shards", "Bytes per shard", element("p", words, class_="soft")))
    total = sum(each.bytes_in + each.bytes_out for each in moment.shards) or 1
    rows = {}
    for each in moment.shards:
        share = round((each.bytes_in + each.bytes_out) / total, 3)
        rows[f"shard-{each.index}"] = memo(f"shard-{each.index}", _row, each, share)
    inner = table("shards-table", "Shards, since the job began", HEADS)
    return Section(headed("shards", "Bytes per shard", inner), rows)


def _row(shard: Shard, share: float) -> Html:
    return row(
        str(shard.index),
        size(shard.bytes_in),
        size(shard.bytes_out),
        f"{size(shard.rate)}/s",
        together(bar(share, "bytes"), f"{100 * share:.0f} %"),
        f"{shard.pushes:,}",
        f"{shard.dropped:,}",
        _versions(shard),
        shard.where,
        name=f"shard-{shard.index}",
    )


def _versions(shard: Shard) -> str:
    if not shard.keys:
        return "holds nothing"
    return str(shard.newest) if shard.oldest == shard.newest else f"{shard.oldest} to {shard.newest}"

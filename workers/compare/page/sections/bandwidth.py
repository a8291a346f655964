"""Bandwidth, in the columns that users of nccl-tests read every day."""

from __future__ import annotations

from workers.compare.figures import NOTHING, digits
from workers.compare.findings import Bandwidth
from workers.compare.page.chart import Column, table
from workers.compare.page.element import Html
from workers.compare.page.material import Material, section

COLUMNS = (
    Column("row"),
    Column("setting", words=True),
    *map(
        Column, ("size (B)", "count", "type", "redop", "time (us)", "algbw (GB/s)", "busbw (GB/s)", "#wrong")
    ),
)


def bandwidth(material: Material) -> Html | None:
    """The table, where exchanges were timed."""
    found = material.findings.bandwidth
    if not found:
        return None
    lead = (
        "One exchange of the whole model. algbw is its size by its time, busbw is algbw times 2(n − 1)/n:"
        " what the busiest link of a ring carries. #wrong counts elements that are not what they should be."
    )
    told = table("Exchanges in the columns of nccl-tests", COLUMNS, [_line(material, each) for each in found])
    return section("bandwidth", "Bandwidth, as nccl-tests has it", lead, told)


def _line(material: Material, each: Bandwidth) -> list[str | Html]:
    wrong = NOTHING if each.wrong is None else str(each.wrong)
    times = [digits(value) for value in (each.time, each.algbw, each.busbw)]
    shape = [f"{each.size:,}", f"{each.count:,}", each.type, each.redop]
    return [material.name_under(each.row, [each.setting]), each.setting, *shape, *times, wrong]

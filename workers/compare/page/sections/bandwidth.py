"""Bandwidth, in the columns that users of nccl-tests read every day."""

from __future__ import annotations

from hubring.ps.markup import Html
from hubring.workers.compare.exchange_table import cells
from hubring.workers.compare.nccl_tests import COLUMNS
from hubring.workers.compare.page.chart import Column, table
from hubring.workers.compare.page.material import Material, section

_LEAD = (
    "One exchange of the whole model: the time for which a step had something on its way, exposed or hidden,"
    " with the wait for slower workers, and with the server's step where the server steps. algbw is the"
    " model's size by that time. busbw is algbw times 2(n − 1)/n: the rate on each link of a ring. A hub's"
    " links carry other amounts; there it says how fast a ring's would have to be for the same time. #wrong"
    " counts the elements of the parameters that the gate found farther from the first synchronous row's than"
    " it allows, over all seeds; a dash stands where it compared none."
)


def bandwidth(material: Material) -> Html | None:
    """The table, where exchanges were timed."""
    found = material.findings.bandwidth
    if not found:
        return None
    heads = (Column("row"), Column("setting", words=True), *map(Column, COLUMNS))
    lines = [[material.name_under(each.row, [each.setting]), each.setting, *cells(each)] for each in found]
    told = table("Exchanges in the columns of nccl-tests", heads, lines)
    return section("bandwidth", "Bandwidth, as nccl-tests has it", _LEAD, told)

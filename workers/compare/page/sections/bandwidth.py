"""Bandwidth in the columns of nccl-tests."""

from __future__ import annotations

from typing import Any

from hubring.workers.compare.output.exchange_table import cells
from hubring.workers.compare.page.figure import Table
from hubring.workers.compare.page.material import Material
from hubring.workers.compare.result.nccl_tests import COLUMNS


def bandwidth(material: Material) -> dict[str, Any] | None:
    """Returns the table, if exchanges were timed."""
    found = material.findings.bandwidth
    if not found:
        return None
    heads = ("row", "setting", *COLUMNS)
    lines = [[material.name_under(each.row, [each.setting]), each.setting, *cells(each)] for each in found]
    table = Table("Exchanges in the columns of nccl-tests", heads, lines, words=("setting",))
    return {"title": "Bandwidth in the columns of nccl-tests", "table": table}

"""By how many versions gradients were behind the values that they were applied to."""

from __future__ import annotations

from hubring.ps.page.kit.chart import bins
from hubring.ps.page.markup_cache import Memo
from hubring.ps.page.section import TEMPLATES, Section
from hubring.ps.page.snapshot import Moment

_MACROS = TEMPLATES.macros("staleness.html")


def staleness(moment: Moment, memo: Memo) -> Section:
    """A histogram."""
    return Section(memo("staleness", _MACROS.section, bins(moment.staleness), moment.on_ring))

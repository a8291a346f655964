"""Who is slow in an experiment, and how."""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct

from hubring.ps.core.errors import UsageError

Kind = Literal["constant", "pareto", "host"]


class Straggler(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is slow, and how.

    Attributes:
        kind: `constant`: the same every step; `pareto`: mostly little, seldom much; `host`: the
            ranks are one host, slow in the same steps.
        seconds: What a step takes longer, on average.
        ranks: Who; empty: all.
        shape: Of the Pareto distribution, above 1; the smaller, the heavier its tail.
    """

    kind: Kind
    seconds: float
    ranks: tuple[int, ...] = ()
    shape: float = 2.5

    def __post_init__(self) -> None:
        if self.kind not in (kinds := get_args(Kind)):
            raise UsageError(f"straggler: kind {self.kind!r}; there are {', '.join(kinds)}")
        if self.seconds < 0 or self.shape <= 1:
            raise UsageError(
                f"straggler: {self.seconds:g} s with shape {self.shape:g};"
                " seconds are at least 0, and the shape is above 1, or there is no mean"
            )

    def __str__(self) -> str:
        who = "" if not self.ranks else "@" + ",".join(map(str, self.ranks))
        return f"{self.kind}{1e3 * self.seconds:g}ms{who}"

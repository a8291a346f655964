"""Which ranks are slow in an experiment, and how."""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct

from hubring.ps.core.errors import UsageError

Kind = Literal["constant", "pareto", "host"]


class Straggler(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which ranks are slow, and how.

    Attributes:
        kind: `constant`: the same delay in every step; `pareto`: mostly short delays, and a few long ones;
            `host`: the ranks share one host and are slow in the same steps.
        seconds: Mean delay of a step.
        ranks: The slow ranks; empty: all.
        shape: Shape of the Pareto distribution, above 1; a smaller shape has a heavier tail.
    """

    kind: Kind
    seconds: float
    ranks: tuple[int, ...] = ()
    shape: float = 2.5

    def __post_init__(self) -> None:
        if self.kind not in (kinds := get_args(Kind)):
            raise UsageError(f"straggler: kind {self.kind!r}; expected one of {', '.join(kinds)}")
        if self.seconds < 0 or self.shape <= 1:
            raise UsageError(
                f"straggler: {self.seconds:g} s with shape {self.shape:g};"
                " expected at least 0 s, and a shape above 1, since otherwise there is no mean"
            )

    def __str__(self) -> str:
        who = "" if not self.ranks else "@" + ",".join(map(str, self.ranks))
        return f"{self.kind}{1e3 * self.seconds:g}ms{who}"

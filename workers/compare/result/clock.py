"""The clocks of the hosts in timelines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct


class Clock(Struct, frozen=True):
    """A host's clock.

    Attributes:
        name: The host's name.
        moved_us: What was added to its times, to have them on the coordinator's clock.
        error_us: Half of the round trip in which the offset was measured; None: it was not measured.
    """

    name: str
    moved_us: float = 0.0
    error_us: float | None = None

    @property
    def aligned(self) -> bool:
        return self.error_us is not None

    def __str__(self) -> str:
        if self.error_us is None:
            return f"{self.name} unknown, so its processes are marked as unaligned"
        return (
            f"{self.name} {self.moved_us / 1e6:+.6f} s, with an error of at most {self.error_us / 1e3:.3f} ms"
        )


def worst(runs: Iterable[Sequence[Clock]]) -> list[Clock]:
    """Returns the largest move and the largest error of each host over all runs with several hosts."""
    found: dict[str, Clock] = {}
    for clock in (clock for run in runs if len(run) > 1 for clock in run):
        before = found.get(clock.name, clock)
        known = None not in (before.error_us, clock.error_us)
        found[clock.name] = Clock(
            clock.name,
            max(before.moved_us, clock.moved_us, key=abs),
            max(before.error_us or 0.0, clock.error_us or 0.0) if known else None,
        )
    return list(found.values())


def sentence(clocks: Sequence[Clock]) -> str:
    """Returns how the hosts' clocks differ, and how certain that is; empty for one host."""
    if not clocks:
        return ""
    return f"Clocks, and what the timelines add to them: {'; '.join(map(str, clocks))}."

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
        drift_us: By how much it differed at the start and the end of the run; None: it was measured once.
    """

    name: str
    moved_us: float = 0.0
    error_us: float | None = None
    drift_us: float | None = None

    @property
    def aligned(self) -> bool:
        return self.error_us is not None

    def __str__(self) -> str:
        if self.error_us is None:
            return f"{self.name} unknown, so its processes are marked as unaligned"
        error, then = self.error_us + (self.drift_us or 0.0), " when it was measured"
        found = f"{self.name} {self.moved_us / 1e6:+.6f} s, with an error of at most {error / 1e3:.3f} ms"
        return found + then if self.drift_us is None else found


def worst(runs: Iterable[Sequence[Clock]]) -> list[Clock]:
    """Returns the largest move, error and drift of each host over all runs with several hosts."""
    found: dict[str, Clock] = {}
    for clock in (clock for run in runs if len(run) > 1 for clock in run):
        before = found.get(clock.name, clock)
        found[clock.name] = Clock(
            clock.name,
            max(before.moved_us, clock.moved_us, key=abs),
            _larger(before.error_us, clock.error_us),
            _larger(before.drift_us, clock.drift_us),
        )
    return list(found.values())


def _larger(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else max(one, other)


def sentence(clocks: Sequence[Clock]) -> str:
    """Returns how the hosts' clocks differ, and how certain that is; empty for one host."""
    if not clocks:
        return ""
    return f"Clocks, and what the timelines add to them: {'; '.join(map(str, clocks))}."

"""The delays of a straggler."""

from __future__ import annotations

from hubring.workers.runtime.slowdown import SlowdownSettings, Straggler, StragglerKind


def delays(kind: StragglerKind, rank: int = 0, seed: int = 0, steps: int = 200, **how: object) -> list[float]:
    straggler = Straggler(kind=kind, seconds=0.02, **how)  # type: ignore[arg-type]
    slowness = SlowdownSettings(straggler, seed=seed)
    return [slowness.lateness(rank, step) for step in range(steps)]

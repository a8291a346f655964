"""Warns if ranks in lockstep send different hyperparameters in one round. Those of the lowest rank count."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hubring.ps.core.messages import Push

log = logging.getLogger(__name__)


class OptionCheck:
    """Compares the hyperparameters of each round's pushes, and warns once."""

    def __init__(self) -> None:
        self._warned = False

    def compare(self, pushes: Sequence[Push]) -> None:
        """Compares the pushes of one round, which are in rank order."""
        if self._warned:
            return
        first = pushes[0]
        other = next((push for push in pushes if push.hyper != first.hyper), None)
        if other is not None:
            self._warned = True
            log.warning("%s", _difference(first, other))


def _difference(first: Push, other: Push) -> str:
    names = sorted(first.hyper.keys() | other.hyper.keys())
    name = next(name for name in names if first.hyper.get(name) != other.hyper.get(name))
    rank = first.sender.rank
    return (
        f"rank {rank} has {name}={first.hyper.get(name)} in step {first.clock + 1}, and rank"
        f" {other.sender.rank} has {name}={other.hyper.get(name)}; the hub steps with those of rank {rank}."
        " Set the same on all ranks; average a scheduler's metric over the ranks with hubring.allreduce first"
    )

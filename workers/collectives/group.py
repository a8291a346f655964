"""Groups of ranks for collectives."""

from __future__ import annotations

from collections.abc import Collection

from hubring.ps.core.errors import UsageError


class Group:
    """A group of ranks, made by `hubring.new_group`.

    Attributes:
        ranks: The members' ranks in the job, ascending.
        removed: Whether `hubring.remove_group` was called. A removed group cannot be used.
    """

    def __init__(self, ranks: Collection[int], own: int, size: int) -> None:
        _check(ranks, size)
        self.ranks = tuple(sorted(ranks))
        self.removed = False
        self._own = own
        self._has_all = len(self.ranks) == size

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks as a `Call` has them: empty for all ranks."""
        return () if self._has_all else self.ranks

    def rank(self) -> int:
        """Returns this worker's rank within the group, from 0.

        Raises:
            UsageError: This worker is not a member.
        """
        if not self.included():
            raise UsageError(f"rank {self._own} is not in {self}: check included() first")
        return self.ranks.index(self._own)

    def size(self) -> int:
        """Returns the number of members."""
        return len(self.ranks)

    def included(self) -> bool:
        """Whether this worker is a member."""
        return self._own in self.ranks

    def __str__(self) -> str:
        return f"the group of ranks {list(self.ranks)}"


def _check(ranks: Collection[int], size: int) -> None:
    if not ranks or len(set(ranks)) < len(ranks) or not all(0 <= rank < size for rank in ranks):
        raise UsageError(
            f"invalid group of ranks {list(ranks)}: pass one or more different ranks from 0 to {size - 1}"
        )

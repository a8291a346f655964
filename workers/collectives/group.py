"""Some of the ranks, for collectives among themselves."""

from __future__ import annotations

from collections.abc import Collection

from hubring.ps.core.errors import UsageError


class Group:
    """What `hubring.new_group` makes, on all ranks alike.

    Attributes:
        ranks: Its members, rising.
        removed: Whether `hubring.remove_group` has been called: nothing can be done in it any more.
    """

    def __init__(self, ranks: Collection[int], own: int, size: int) -> None:
        _check(ranks, size)
        self.ranks = tuple(sorted(ranks))
        self.removed = False
        self._own = own
        self._everybody = len(self.ranks) == size

    @property
    def members(self) -> tuple[int, ...]:
        """As a call names them: none for all ranks."""
        return () if self._everybody else self.ranks

    def rank(self) -> int:
        """This worker's place among the members, from 0.

        Raises:
            UsageError: It is none of them.
        """
        if not self.included():
            raise UsageError(f"rank {self._own} is none of {self}: ask included() first")
        return self.ranks.index(self._own)

    def size(self) -> int:
        """How many members there are."""
        return len(self.ranks)

    def included(self) -> bool:
        """Whether this worker is a member."""
        return self._own in self.ranks

    def __str__(self) -> str:
        return f"the group of ranks {list(self.ranks)}"


def _check(ranks: Collection[int], size: int) -> None:
    if not ranks or len(set(ranks)) < len(ranks) or not all(0 <= rank < size for rank in ranks):
        raise UsageError(
            f"a group of ranks {list(ranks)}: name one or more different ranks, each from 0 to {size - 1}"
        )

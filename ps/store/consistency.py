"""When a gradient changes the parameters, and which workers may read them afterwards.

Law: every mode is the same rule with other constants. A key's clock for a worker
is the number of steps that the worker completed on the key. The rule compares
clocks and counts contributors. Nothing else in the system knows the names of the
modes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Consistency:
    """The constants of one mode. Create it with `BSP`, `ASP`, `SSP`, `BackupWorkers` or `by_name`.

    Attributes:
        lockstep: Updates happen in rounds: a push counts only for the key's current
            version, and the gradients of a round are applied as one mean.
        backup: How many live workers a round does not wait for.
        staleness: How many steps a reader may be ahead of the slowest live worker.
        finite: A NaN or infinite gradient ends the job before it reaches an optimizer.
    """

    lockstep: bool
    backup: int = 0
    staleness: float = inf
    finite: bool = True

    @property
    def stable(self) -> bool:
        """Whether a key's values do not change until each of its readers has pushed again."""
        return self.lockstep and not self.backup

    def may_apply(self, contributors: int, live: int) -> bool:
        """Returns whether this many gradients, at least one, complete a round of `live` workers."""
        return contributors >= (live - self.backup if self.lockstep else 1)

    def may_read(self, clock: int, clocks: Collection[int]) -> bool:
        """Returns whether a worker that completed `clock` steps may read.

        Args:
            clock: The reader's clock.
            clocks: The clocks of all live workers. A lost worker's clock would block all readers forever.
        """
        return clock - min(clocks, default=clock) <= self.staleness


# The usual acronyms stay in capitals.


def BSP() -> Consistency:  # noqa: N802
    """Bulk synchronous parallel (Valiant, CACM 1990): round t applies the mean over all workers, once.

    All workers read the same parameters.
    """
    return Consistency(lockstep=True, staleness=0)


def ASP() -> Consistency:  # noqa: N802
    """Asynchronous parallel (Downpour SGD; Dean et al., NIPS 2012): applied on arrival, read at once.

    The staleness of a push is the version at which it is applied minus the version that its worker
    read last.
    """
    return Consistency(lockstep=False)


def SSP(staleness: int) -> Consistency:  # noqa: N802
    """Stale synchronous parallel (Ho et al., NIPS 2013): applied on arrival; fast workers wait to read.

    A read at clock c sees all updates of every live worker up to clock c - staleness - 1, possibly
    newer ones, and always the reader's own. 0 has BSP's bound, infinity is ASP. Clocks are per key, so
    the bound holds for each slice of the model separately, not across slices.
    """
    return Consistency(lockstep=False, staleness=staleness)


def BackupWorkers(backup: int) -> Consistency:  # noqa: N802
    """Backup workers (Chen et al., 2016): a round waits for the gradients of all but `backup` workers.

    It applies the mean of the first gradients. Later gradients are dropped by their clock. A worker
    counts once per round.
    """
    return Consistency(lockstep=True, backup=backup)


def by_name(mode: str, staleness: int = 0, backup: int = 0) -> Consistency:
    """Returns the rule for the values of `--mode`, `--staleness` and `--backup`, which the settings check."""
    rules = {"bsp": BSP(), "asp": ASP(), "ssp": SSP(staleness), "backup": BackupWorkers(backup)}
    return rules[mode]

"""When a gradient may change the parameters, and who may read them afterwards.

Law: every mode is the same rule with other constants. A key's clock for a worker
is the number of steps that the worker completed on the key; the rule compares
clocks and counts contributors, and nothing else in the system knows the modes'
names.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import inf

from hubring.ps.core.errors import ConfigError

MODES = ("bsp", "asp", "ssp", "backup")


@dataclass(frozen=True, slots=True)
class Consistency:
    """One rule, by its constants; made by `BSP`, `ASP`, `SSP`, `BackupWorkers` or `by_name`.

    Attributes:
        lockstep: Updates happen in rounds: a push counts only for the version at which
            the key stands, and all its round's gradients are applied as one mean.
        backup: How many live workers a round does not wait for.
        staleness: By how many steps a reader may be ahead of the slowest live worker.
        finite: What is NaN or infinite counts for nothing: it ends the job before an optimizer has it.
    """

    lockstep: bool
    backup: int = 0
    staleness: float = inf
    finite: bool = True

    def may_apply(self, contributors: int, live: int) -> bool:
        """Whether that many gradients of one round suffice, with `live` workers taking part."""
        wanted = live - self.backup if self.lockstep else 1
        return contributors >= max(1, wanted)

    def may_read(self, clock: int, clocks: Collection[int]) -> bool:
        """Whether a worker that completed `clock` steps may go on.

        Args:
            clock: The reader's own.
            clocks: Those of all live workers. The dead are left out, or nobody could ever read again.
        """
        return clock - min(clocks, default=clock) <= self.staleness


# The field's acronyms keep their capitals.


def BSP() -> Consistency:  # noqa: N802
    """Bulk synchronous parallel (Valiant, CACM 1990): round t applies the mean over all workers, once.

    All read the same parameters.
    """
    return Consistency(lockstep=True, staleness=0)


def ASP() -> Consistency:  # noqa: N802
    """Asynchronous parallel (Downpour SGD; Dean et al., NIPS 2012): applied on arrival, read at once.

    The staleness of a push is the version at which it was applied minus the version that its worker
    had read.
    """
    return Consistency(lockstep=False)


def SSP(staleness: int) -> Consistency:  # noqa: N802
    """Stale synchronous parallel (Ho et al., NIPS 2013): applied on arrival, the fast wait in their read.

    A read at clock c sees all updates of every live worker up to clock c - staleness - 1, maybe newer
    ones, and always the reader's own. 0 gives BSP's bound, infinity ASP. Clocks are kept per key, so
    the bound holds for each slice of the model by itself, not across slices.
    """
    return Consistency(lockstep=False, staleness=staleness)


def BackupWorkers(backup: int) -> Consistency:  # noqa: N802
    """Backup workers (Chen et al., 2016): a round applies the mean of the first gradients, all but `backup`.

    Later ones are dropped by their clock; one worker counts once in a round.
    """
    return Consistency(lockstep=True, backup=backup)


def by_name(mode: str, staleness: int = 0, backup: int = 0) -> Consistency:
    """The rule that the command line names.

    Raises:
        ConfigError: No such mode, or a constant that it does not take.
    """
    if mode not in MODES:
        raise ConfigError(f"no mode {mode!r}: give --mode {', '.join(MODES[:-1])} or {MODES[-1]}")
    if staleness < 0 or (staleness and mode != "ssp"):
        raise ConfigError(
            f"--staleness {staleness} does not fit --mode {mode}:"
            " give --mode ssp and a whole number from 0, or leave it out"
        )
    if (backup < 1) if mode == "backup" else backup:
        raise ConfigError(
            f"--backup {backup} does not fit --mode {mode}:"
            " give --mode backup and a whole number from 1, or leave it out"
        )
    rules = {"bsp": BSP(), "asp": ASP(), "ssp": SSP(staleness), "backup": BackupWorkers(backup)}
    return rules[mode]

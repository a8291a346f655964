"""What one run left behind: all that the invariants look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from torch import Tensor

from tests.campaign.resources import Held
from tests.campaign.scenario import Scenario

State = Mapping[str, Tensor]
"""Parameters by name."""


class Ended(Struct, frozen=True):
    """How one program ended.

    Attributes:
        name: `server`, or the name of a worker.
        code: The exit code, negative for a signal; None if it ran until the limit.
        victim: Whether the fault was done to this program.
        error: The error in its result.
        said: Its standard error.
        late: Whether it replaced a lost worker.
    """

    name: str
    code: int | None
    victim: bool = False
    error: str = ""
    said: str = ""
    late: bool = False

    @property
    def failed(self) -> bool:
        """Whether it ended by itself, and not well."""
        return self.code is not None and self.code > 0


class Look(Struct, frozen=True):
    """What a worker saw after one step.

    Attributes:
        step: The step.
        seconds: How long it took.
        seen: By rank: slots of the ledger that are not zero.
        backward: Slots that are lower than after the step before.
    """

    step: int
    seconds: float
    seen: tuple[int, ...]
    backward: int = 0


class Trail(Struct, frozen=True):
    """The steps of one worker process."""

    rank: int
    looks: tuple[Look, ...]


class Act(Struct, frozen=True):
    """One job: from the start of the server to the end of all programs.

    Attributes:
        programs: How each program ended; the server first.
        trails: The steps of each worker, by name.
        states: The final parameters of each worker that finished, by name.
        checkpoint: The parameters in the newest checkpoint; None without one.
        checkpoint_step: The step of that checkpoint; -1 without one.
        checkpoint_rounds: The version of the slots in it. With backup workers it can be later than the
            step, which is that of the slowest key.
        summary: The server's result.
    """

    programs: tuple[Ended, ...]
    trails: Mapping[str, Trail] = {}
    states: Mapping[str, State] = {}
    checkpoint: State | None = None
    checkpoint_step: int = -1
    checkpoint_rounds: int = -1
    summary: Mapping[str, Any] = {}

    @property
    def server(self) -> Ended:
        return self.programs[0]

    @property
    def workers(self) -> tuple[Ended, ...]:
        """The workers, named `rank-RANK-ACT`, without processes that the job left."""
        return tuple(program for program in self.programs if program.name.startswith("rank-"))

    def ended(self, name: str) -> Ended:
        return next(program for program in self.programs if program.name == name)


class Evidence(Struct, frozen=True):
    """All of one run.

    Attributes:
        scenario: What was to happen.
        fired: Whether the fault happened.
        forwarded: Bytes that passed the relays.
        acts: The jobs: the one with the fault, then the one that resumes.
        reference: The final parameters of the undisturbed run; None if the mode has no such run.
        paused: Seconds for which processes were stopped.
        before: Resources of the server, the shards and the workers before the fault.
        after: The same after it, where the process still runs.
        seconds: How long the run took.
        checkpoints: The number of checkpoints when the second job starts; 0 without one.
    """

    scenario: Scenario
    fired: bool
    forwarded: int
    acts: tuple[Act, ...]
    reference: State | None = None
    paused: float = 0.0
    before: Mapping[str, Held] = {}
    after: Mapping[str, Held] = {}
    seconds: float = 0.0
    checkpoints: int = 0

    @property
    def last(self) -> Act:
        return self.acts[-1]

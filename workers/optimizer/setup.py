"""The settings of a `DistributedOptimizer`: from its caller, or from `hubring.init()`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch

from hubring.ps.checkpoint.checkpoint_folder import OF_WORKERS, newest_step
from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.checkpoints import Checkpoints
from hubring.workers.optimizer.entering import give_states
from hubring.workers.optimizer.own_state import OwnStates
from hubring.workers.reducer.first_means import any_rank
from hubring.workers.reducer.reducer import ReducerOptions
from hubring.workers.runtime import context
from hubring.workers.runtime.training_record import FlightRecorder
from hubring.workers.runtime.worker import Trainer, Worker, unwatched

log = logging.getLogger(__name__)


class Setup(NamedTuple):
    """The communicator of an optimizer, its settings, and the functions that it calls."""

    communicator: Communicator
    bucket_bytes: int | None
    after_step: Callable[[int], None]
    adopt: Callable[[Trainer], None]
    checkpoints: Callable[[Communicator], Checkpoints | None] = lambda _: None
    states: Callable[[Communicator], OwnStates | None] = lambda _: None
    recorder: FlightRecorder | None = None
    watch: Callable[[Iterable[torch.Tensor]], Callable[[int], None]] = lambda _: unwatched

    @classmethod
    def of(
        cls,
        communicator: Communicator | None,
        bucket_bytes: int | None,
        after_step: Callable[[int], None] | None,
    ) -> Setup:
        """Fills in what the caller did not pass from `hubring.init()`.

        Raises:
            UsageError: There is no `communicator`, and `hubring.init()` was not called.
        """
        if communicator is not None:
            return cls(communicator, bucket_bytes, after_step or ignore, ignore)
        here = context.current()
        bucket_bytes = bucket_bytes or here.config.bucket_bytes
        here.give_state = partial(give_states, here.communicator)
        step_completed = after_step or here.step_completed
        return cls(
            _continued(here),
            bucket_bytes,
            step_completed,
            here.adopt,
            partial(_checkpoints, here),
            partial(_states, here),
            here.recorder,
            here.watch,
        )


def _checkpoints(here: Worker, communicator: Communicator) -> Checkpoints | None:
    """Returns the worker's checkpoints, made for its first optimizer; None if this worker saves nothing."""
    directory = here.config.checkpoint_dir
    if directory is None:
        if communicator.steps_on == "worker" and communicator is here.communicator:
            here.saves = None  # what a hub that steps would have saved
        unsaved = communicator.steps_on == "worker" and communicator.rank == 0
        if unsaved and here.session is not None and here.session.saves:
            log.warning(
                "the server's --checkpoint-dir has no effect, because the workers step, so training starts at"
                " step 0: pass --checkpoint-dir to ps-worker too, or --aggregate to ps-server submit, which"
                " then does so"
            )
        return None
    if communicator.steps_on == "server":
        if here.session is not None and not here.session.saves:
            log.info(
                "the worker's --checkpoint-dir has no effect: the hub saves checkpoints, to the folder of"
                " ps-server start --checkpoint-dir"
            )
        return None
    if communicator is not here.communicator:
        log.warning("this optimizer and its model are in no checkpoint, since the hub steps for another one")
        return None
    if not isinstance(here.saves, Checkpoints):
        here.saves = Checkpoints(directory, here.config.checkpoint_every, communicator, here.job)
    return here.saves


def _states(here: Worker, communicator: Communicator) -> OwnStates | None:
    """Returns what saves the worker's own state on a hub that steps; None elsewhere."""
    session = here.session
    if session is None or communicator.steps_on != "server":
        return None
    if here.saves is None:
        here.saves = OwnStates(session.states, communicator, session.saves, lambda: here.completed_steps)
    assert isinstance(here.saves, OwnStates)
    return here.saves


def _continued(here: Worker) -> Communicator:
    """Returns the communicator; the workers of a hub step from the start if they did so before a restart.

    Every rank of a hub in lockstep calls it.
    """
    communicator = here.communicator
    hub = communicator.stepping_hub
    if hub is None or hub.has_model or communicator.late or not communicator.lockstep:
        return communicator
    folder = here.config.checkpoint_dir
    has = communicator.rank == 0 and folder is not None and newest_step(folder / OF_WORKERS) is not None
    if not any_rank(communicator, "continues", has, communicator.timeout):
        return communicator
    return communicator.averaging("the job continues from a checkpoint that the workers have written")


def ignore(_: object) -> None:
    """Does nothing: the default for a callback."""


def warn_of_restart(step: int) -> None:
    """Warns of a restarted script that counts its steps from 0."""
    log.warning(
        "this is step %d of a restarted job, but the script did not read optimizer.completed_steps: read it"
        " to continue from that step instead of step 0",
        step,
    )


def check_options(options: ReducerOptions, communicator: Communicator, *, uneven: bool, asks: bool) -> None:
    """Checks that the options fit together; `asks`: the optimizer evaluates a closure several times per step.

    Raises:
        ConfigError: They do not.
    """
    passes, cross_barrier = options.passes_per_step, options.cross_barrier
    if passes < 1:
        raise ConfigError(f"backward_passes_per_step is {passes}; it must be at least 1")
    if cross_barrier and options.model is None:
        raise ConfigError(
            "cross_barrier=True needs the model, because its modules' forwards wait for parameters:"
            " call DistributedOptimizer(optimizer, model, cross_barrier=True)"
        )
    if cross_barrier and communicator.members is not None:
        raise ConfigError(
            "cross_barrier=True leaves an exchange in flight, and with --min-workers a step that loses a"
            " worker is exchanged again as a whole: remove cross_barrier=True or --min-workers"
        )
    if uneven and (cross_barrier or asks or not communicator.lockstep):
        raise ConfigError(
            "uneven=True needs ranks in lockstep and one exchange per step that step() waits for: remove"
            " uneven=True, cross_barrier=True or LBFGS; an asynchronous hub does not need uneven=True"
        )

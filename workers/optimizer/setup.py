"""The settings of a `DistributedOptimizer`: from its caller, or from `hubring.init()`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch

from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.checkpoints import Checkpoints
from hubring.workers.optimizer.newcomers import give_states
from hubring.workers.runtime import context
from hubring.workers.runtime.in_flight import FlightRecorder
from hubring.workers.runtime.trainer import Trainer
from hubring.workers.runtime.worker import Worker, unwatched

log = logging.getLogger(__name__)

BUCKET_BYTES = 4 << 20
"""Default maximum size of a bucket: one slice of the hub. Tuning groups buckets."""

GPU_BUCKET_BYTES = 32 << 20
"""The same for parameters on a GPU. Measured for 100 MiB from two workers on one H100: buckets of 4, 32 and
128 MiB take 43, 8.0 and 4.1 ms to a hub on the GPU, and 57, 39 and 41 ms through host memory."""

UNBOUNDED = sys.maxsize
"""No maximum size: one bucket per group, dtype and device, so the fewest messages."""


class Setup(NamedTuple):
    """The communicator of an optimizer, its settings, and the functions that it calls."""

    communicator: Communicator
    bucket_bytes: int | None
    after_step: Callable[[int], None]
    adopt: Callable[[Trainer], None]
    checkpoints: Checkpoints | None = None
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
            here.communicator,
            bucket_bytes,
            step_completed,
            here.adopt,
            _checkpoints(here),
            here.recorder,
            here.watch,
        )


def bytes_of_bucket(parameters: Iterable[torch.Tensor], *, at_once: bool) -> int:
    """Returns the maximum size of a bucket if no setting gives one.

    Buckets that are sent at once and awaited together gain nothing from a limit: slices pipeline on
    their own.
    """
    if at_once:
        return UNBOUNDED
    on_gpu = any(parameter.device.type != "cpu" for parameter in parameters)
    return GPU_BUCKET_BYTES if on_gpu else BUCKET_BYTES


def _checkpoints(here: Worker) -> Checkpoints | None:
    """Returns the worker's checkpoints, made for its first optimizer; None if this worker saves nothing."""
    directory = here.config.checkpoint_dir
    if directory is None:
        unsaved = here.communicator.steps_on == "worker" and here.communicator.rank == 0
        if unsaved and here.session is not None and here.session.saves:
            log.warning(
                "the server's --checkpoint-dir has no effect, because the workers step: pass --checkpoint-dir"
                " to ps-worker, or --aggregate to ps-run"
            )
        return None
    if here.communicator.steps_on == "server":
        log.info(
            "the worker's --checkpoint-dir has no effect: the hub saves checkpoints, to the folder of"
            " ps-server start --checkpoint-dir"
        )
        return None
    if here.saves is None:
        here.saves = Checkpoints(directory, here.config.checkpoint_every, here.communicator, here.job)
    assert isinstance(here.saves, Checkpoints)
    return here.saves


def ignore(_: object) -> None:
    """Does nothing: the default for a callback."""


def check_options(
    model: torch.nn.Module | None,
    communicator: Communicator,
    *,
    cross_barrier: bool,
    uneven: bool,
    asks: bool,
) -> None:
    """Checks that the options fit together; `asks`: the optimizer evaluates a closure several times per step.

    Raises:
        ConfigError: They do not.
    """
    if cross_barrier and model is None:
        raise ConfigError(
            "cross_barrier=True needs the model, because its modules' forwards wait for parameters:"
            " call DistributedOptimizer(optimizer, model, cross_barrier=True)"
        )
    if cross_barrier and communicator.heals:
        raise ConfigError(
            "cross_barrier=True leaves an exchange in flight, and with --min-workers a step that loses a"
            " worker is exchanged again as a whole: remove cross_barrier=True or --min-workers"
        )
    if uneven and (cross_barrier or asks or not communicator.lockstep):
        raise ConfigError(
            "uneven=True needs ranks in lockstep and one exchange per step that step() waits for: remove"
            " uneven=True, cross_barrier=True or LBFGS; an asynchronous hub does not need uneven=True"
        )

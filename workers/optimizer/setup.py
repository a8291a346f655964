"""What an optimizer is made with: what its caller gave, and the rest from `hubring.init()`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.checkpoints import Checkpoints
from hubring.workers.runtime import context
from hubring.workers.runtime.in_flight import FlightRecorder
from hubring.workers.runtime.trainer import Trainer
from hubring.workers.runtime.worker import Worker, unwatched

log = logging.getLogger(__name__)

BUCKET_BYTES = 4 << 20
"""Where a bucket is full unless the settings say otherwise: a slice of the hub. Their groups are tuned."""

UNBOUNDED = sys.maxsize
"""Where none is ever full: there are as many as kinds, which is as few messages as there can be."""


class Setup(NamedTuple):
    """What an optimizer exchanges by, and whom it reports to."""

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
        """Fills in what the caller left to `hubring.init()`.

        Raises:
            UsageError: It left something, and that was not called.
        """
        if communicator is not None:
            return cls(communicator, bucket_bytes, after_step or ignore, ignore)
        here = context.current()
        bucket_bytes = bucket_bytes or here.config.bucket_bytes
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
    """Where a bucket is full if nobody has said so.

    What is handed over at once, and awaited as a whole, gains nothing by being cut: slices pipeline on
    their own. A GPU's buckets do gain: one is copied to the host while another is on its way.
    """
    whole = at_once and all(parameter.device.type == "cpu" for parameter in parameters)
    return UNBOUNDED if whole else BUCKET_BYTES


def _checkpoints(here: Worker) -> Checkpoints | None:
    """What keeps this job's state where no hub does; made for the first optimizer."""
    directory = here.config.checkpoint_dir
    if directory is None:
        return None
    if here.communicator.steps_on == "server":
        log.info("this job's checkpoints are the hub's: ps-server start --checkpoint-dir says where")
        return None
    if here.saves is None:
        here.saves = Checkpoints(directory, here.config.checkpoint_every, here.communicator, here.job)
    assert isinstance(here.saves, Checkpoints)
    return here.saves


def ignore(_: object) -> None:
    """Nobody wants to know."""

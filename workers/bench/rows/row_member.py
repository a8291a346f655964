"""What a member needs of the way in which its row exchanges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hubring.workers.bench.job import Job
from hubring.workers.bench.rows.expected_parameters import Truth
from hubring.workers.bench.rows.model import Bucket, FlatModel

_CODED_SLACK = 0.02
"""Of the largest parameter. A codec rounds: an 8-bit one by 1/254 of the largest gradient near by."""


class Check(Protocol):
    """What must come out of every step."""

    def write(self, gradients: Iterable[Tensor], rank: int) -> None:
        """Fills flat tensors with a rank's gradients of the step to come, as backward would."""

    def advance(self) -> None:
        """Takes the step."""

    def wrong(self, values: Iterable[Tensor]) -> int:
        """How many elements of flat parameters are not what they must be by now."""


class Side(ABC):
    """One process's part in a row.

    Attributes:
        ranks: Whose gradients are to be written in this process: its own alone, but for a bound, which is
            all ranks.
        check: Follows the steps.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self.ranks: Sequence[int] = (rank,)
        self.check = self._check_for(job)
        self._job = job

    def _check_for(self, job: Job) -> Check:
        return Truth(job.optimizer, job.size, _CODED_SLACK if job.codec else 0.0)

    @abstractmethod
    def gradients(self, rank: int) -> Sequence[Tensor]:
        """Flat tensors in which this rank's next gradients are to be written."""

    @abstractmethod
    def values(self) -> Sequence[Tensor]:
        """Flat tensors, the parameters that the last step left in this process."""

    def prepare(self) -> None:  # noqa: B027 - most have nothing to do
        """What a forward pass would do besides computing; not timed."""

    @abstractmethod
    def step(self) -> None:
        """From everyone's gradients to the new parameters: what is timed."""

    def await_device(self) -> None:
        """Returns once a GPU has done all that this process has queued on it."""
        if self._job.device == "cuda":
            torch.cuda.synchronize()

    def digest(self) -> str:
        """Of the parameters, where ranks must have the same bits and `check` sees one's; else empty."""
        return ""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Leaves."""


class FlatSide(Side):
    """A script that exchanges by hand: one flat model, cut into buckets that are stepped one by one.

    Args:
        job: What it is told.
        rank: Which it is.
        bucket_bytes: Where it is cut, if not where the job says.
    """

    def __init__(self, job: Job, rank: int, bucket_bytes: int | None = None) -> None:
        super().__init__(job, rank)
        numel = (bucket_bytes or job.bucket_bytes) // 4
        self._model = FlatModel(job.tensors)
        values, gradients = (torch.split(flat, numel) for flat in (self._model.values, self._model.gradients))
        self._buckets = [
            Bucket(job.optimizer, *pair, size=job.size) for pair in zip(values, gradients, strict=True)
        ]

    def gradients(self, rank: int) -> Sequence[Tensor]:
        return self._model.gradient_parts

    def values(self) -> Sequence[Tensor]:
        return self._model.value_parts

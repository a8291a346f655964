"""The interface between a member and its row's exchange."""

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
"""Share of the largest parameter. An 8-bit codec rounds by up to 1/254 of a block's largest gradient."""


class Check(Protocol):
    """Checks the result of every step."""

    def write(self, gradients: Iterable[Tensor], rank: int) -> None:
        """Writes a rank's gradients of the next step into flat tensors, like backward."""

    def advance(self) -> None:
        """Computes the expected result of the step."""

    def wrong(self, values: Iterable[Tensor]) -> int:
        """Returns the number of wrong elements of flat parameters."""


class Side(ABC):
    """One process of a row.

    Attributes:
        ranks: The ranks whose gradients this process needs: its own rank, or all ranks for a bound.
        check: Checks the results.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self.ranks: Sequence[int] = (rank,)
        self.check = self._check_for(job)
        self._job = job

    def _check_for(self, job: Job) -> Check:
        return Truth(job.optimizer, job.size, _CODED_SLACK if job.codec else 0.0)

    @abstractmethod
    def gradients(self, rank: int) -> Sequence[Tensor]:
        """Returns the flat tensors for this rank's next gradients."""

    @abstractmethod
    def values(self) -> Sequence[Tensor]:
        """Returns this process's parameters after the last step, as flat tensors."""

    def prepare(self) -> None:  # noqa: B027 - most rows do nothing
        """Does the untimed work of a forward pass, without computing."""

    @abstractmethod
    def step(self) -> None:
        """Turns the gradients of all ranks into the new parameters. This is timed."""

    def await_device(self) -> None:
        """Waits until the GPU has finished all queued work of this process."""
        if self._job.device == "cuda":
            torch.cuda.synchronize()

    def digest(self) -> str:
        """Returns a digest of the parameters if `check` covers only rank 0; otherwise empty."""
        return ""

    def close(self) -> None:  # noqa: B027 - most rows do nothing
        """Leaves the group."""


class FlatSide(Side):
    """A script with a hand-written exchange: one flat model in buckets, which are stepped one by one.

    Args:
        job: The job.
        rank: This process's rank.
        bucket_bytes: Bucket size; None: the job's.
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

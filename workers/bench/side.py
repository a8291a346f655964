"""What a member needs of the way in which its row exchanges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from workers.bench.job import Job
from workers.bench.model import FlatModel, optimizer_of


class Side(ABC):
    """One process's part in a row.

    Attributes:
        ranks: Whose gradients this process makes: its own alone, but for a bound, which is all ranks.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self.ranks: Sequence[int] = (rank,)

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

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Leaves."""


class FlatSide(Side):
    """A script that exchanges by hand: one flat model, handed over in buckets, stepped here."""

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__(job, rank)
        self._size = job.size
        self._model = FlatModel(job.tensors)
        self._buckets = self._model.gradients.split(job.bucket_bytes // 4)
        self._optimizer = optimizer_of(job.optimizer, self._model.parameters)

    def gradients(self, rank: int) -> Sequence[Tensor]:
        return self._model.gradient_parts

    def values(self) -> Sequence[Tensor]:
        return self._model.value_parts

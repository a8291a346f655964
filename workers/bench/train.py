"""End to end: whole training steps with an exchange.

    train-alone   each rank trains on its own share without an exchange: the time of computing
    ddp-gloo      a plain script with DistributedDataParallel
    ddp-hub       the same on the backend `hubring`
    hub-*, ring   a script with DistributedOptimizer

A row's exposed exchange is the time of its step minus that of `train-alone`. The result is compared with one
process that trains on the whole batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha256
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

import hubring
from hubring.workers.bench.job import MLP, SAMPLES, BenchJob
from hubring.workers.bench.libraries import wrap
from hubring.workers.bench.member import RowMember, optimizer_of
from hubring.workers.examples import digits
from hubring.workers.peers import rendezvous

_SEED = 0
_GENTLY = 0.1
"""Factor of the learning rate. Faster training is chaotic, and amplifies rounding in another order."""
_TOLERANCE = 1e-2
"""Allowed error, as a share of the largest change of a tensor's elements since the start."""
_ROUNDING = 8 * torch.finfo(torch.float32).eps
"""Allowed rounding error, as a share of a tensor's largest element."""


class Training(RowMember):
    """One rank of a training script: forward, backward, step."""

    def __init__(self, job: BenchJob, rank: int) -> None:
        self._rank = rank
        self._net = network(job.shape)
        self._optimizer, self._model = self._wrap(job)
        self._step = 0
        self._batch = batch(job.shape, rank, 0)
        super().__init__(job, rank)
        self.ranks = ()  # backward computes the gradients

    @abstractmethod
    def _wrap(self, job: BenchJob) -> tuple[torch.optim.Optimizer, nn.Module]:
        """Returns the optimizer to step, and the model to call."""

    def _check_for(self, job: BenchJob) -> ReferenceTraining:
        return ReferenceTraining(job, range(job.size) if self._rank == 0 else ())

    def gradients(self, rank: int) -> Sequence[Tensor]:
        return []

    def values(self) -> Sequence[Tensor]:
        return [parameter.detach() for parameter in self._net.parameters()]

    def prepare(self) -> None:
        """Reads the next batch."""
        self._batch = batch(self._job.shape, self._rank, self._step)
        self._step += 1

    def step(self) -> None:
        train(self._model, self._optimizer, self._batch)

    def digest(self) -> str:
        """All ranks must have the same parameters as rank 0; only rank 0's are compared with one process."""
        found = sha256()
        for values in self.values():
            found.update(values.numpy().data)
        return found.hexdigest()


class AloneTraining(Training):
    """`train-alone`."""

    def _wrap(self, job: BenchJob) -> tuple[torch.optim.Optimizer, nn.Module]:
        return optimizer_of(job.optimizer, self._net.parameters(), _GENTLY), self._net

    def _check_for(self, job: BenchJob) -> ReferenceTraining:
        return ReferenceTraining(job, [self._rank] if self._rank == 0 else ())

    def digest(self) -> str:
        """Returns an empty digest, since ranks without an exchange differ."""
        return ""


class DdpTraining(Training):
    """`ddp-gloo`."""

    backend: ClassVar[Literal["gloo", "hubring"]] = "gloo"

    def _wrap(self, job: BenchJob) -> tuple[torch.optim.Optimizer, nn.Module]:
        rendezvous.join(job.seat(self._rank, self.backend))
        model = wrap(self._net, job)
        return optimizer_of(job.optimizer, model.parameters(), _GENTLY), model


class DdpHubTraining(DdpTraining):
    """`ddp-hub`."""

    backend = "hubring"


class HubringTraining(Training):
    """Hubring's rows, with any topology.

    The bucket size is fixed, as for DDP: tuning it would take as many steps as the bench has.
    """

    def _wrap(self, job: BenchJob) -> tuple[torch.optim.Optimizer, nn.Module]:
        hubring.init()
        local = optimizer_of(job.optimizer, self._net.parameters(), _GENTLY)
        wrapped = hubring.DistributedOptimizer(local, self._net, bucket_bytes=job.bucket_bytes)
        return wrapped, self._net


class ReferenceTraining:
    """One process that trains on the batches of these ranks; without ranks it checks nothing."""

    def __init__(self, job: BenchJob, ranks: Sequence[int]) -> None:
        self._shape, self._ranks = job.shape, ranks
        self._net = network(job.shape)
        self._began = [values.clone() for values in self.values()]
        self._optimizer = optimizer_of(job.optimizer, self._net.parameters(), _GENTLY)
        self._step = 0

    def write(self, gradients: Iterable[Tensor], rank: int) -> None:
        """Does nothing, since backward computes the gradients."""

    def advance(self) -> None:
        """Takes the step."""
        if self._ranks:
            batches = [batch(self._shape, rank, self._step) for rank in self._ranks]
            images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
            train(self._net, self._optimizer, (images, labels))
        self._step += 1

    def values(self) -> list[Tensor]:
        """Returns the current parameters."""
        return [parameter.detach() for parameter in self._net.parameters()]

    def wrong(self, values: Iterable[Tensor]) -> int:
        """Returns the number of elements whose error is too large for rounding in another order."""
        if not self._ranks:
            return 0
        return sum(_wrong(*three) for three in zip(values, self.values(), self._began, strict=True))


def _wrong(found: Tensor, expected: Tensor, began: Tensor) -> int:
    """Compares relative to the progress of training; otherwise untrained parameters would pass."""
    come = (expected - began).abs().max()
    farthest = _TOLERANCE * come + _ROUNDING * expected.abs().max()
    return int((~((found - expected).abs() <= farthest)).sum())  # negated so that NaN counts as wrong


def train(model: nn.Module, optimizer: torch.optim.Optimizer, given: tuple[Tensor, Tensor]) -> None:
    """Runs one step of an ordinary script."""
    optimizer.zero_grad()
    functional.cross_entropy(model(given[0]), given[1]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def network(shape: str) -> nn.Module:
    """Returns the network of the job `digits`, or a perceptron of 25 million parameters; always the same."""
    if shape == "digits":
        return digits.network(_SEED)
    torch.manual_seed(_SEED)
    first, hidden, last = MLP
    # Tanh is smooth. With ReLU, rounding near zero can flip a unit and change its weights.
    return nn.Sequential(
        nn.Linear(first, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, last)
    )


def batch(shape: str, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Returns images and labels of a rank's share of a step's batch; different in each step."""
    count = SAMPLES[shape]
    if shape == "digits":
        images, labels = _digits()
        places = (torch.arange(count) + (step * 31 + rank) * count) % len(labels)
        return images[places], labels[places]
    generator = torch.Generator().manual_seed(1000 * step + rank)
    first, _, last = MLP
    inputs = torch.randn(count, first, generator=generator)
    return inputs, torch.randint(last, (count,), generator=generator)


@cache
def _digits() -> tuple[Tensor, Tensor]:
    images, labels = digits.split(_SEED)[0].tensors
    return images, labels

"""One process of one row: it takes steps on request, and reports the time of each.

    python -m hubring.workers.bench.member MODULE:CLASS JOB RANK

A request is `STEPS alone` or `STEPS together`. Before each step the member writes the gradients, or reads a
batch. With `together` the member then sends `ready` and waits for `go`, so that all ranks start at the same
time. This replaces a row's own barrier: MPI's barrier spins and a hub's costs a round, which would favour
some rows. After the step the member sends `stepped`, and waits for `go` until all ranks have stepped. So an
early rank does not take a core for its next gradients from ranks that are still timed.

The answer is a line of JSON: the seconds of every step, the number of wrong elements, and the parameters'
digest.
"""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hubring.ps.core.errors import ConnectionLost
from hubring.ps.core.types import Hyper
from hubring.ps.optim.hyperparameters import hyper_of
from hubring.workers.bench.job import BenchJob, Dims, MemberLine

OPTIMIZERS = ("sgd", "adam")
"""SGD with momentum 0.9, and Adam; torch's own, fused."""


class FlatModel:
    """Parameters of zeros, float32, with gradients.

    Attributes:
        values: Flat tensor; every parameter is a view of it.
        gradients: Flat tensor; every `parameter.grad` is a view of it.
        parameters: The parameters.
        value_parts: The parameters as flat views.
        gradient_parts: The gradients as flat views.
    """

    def __init__(self, tensors: Sequence[Dims]) -> None:
        numels = [prod(dims) for dims in tensors]
        self.values, self.gradients = torch.zeros(sum(numels)), torch.zeros(sum(numels))
        self.value_parts = torch.split(self.values, numels)
        self.gradient_parts = torch.split(self.gradients, numels)
        self.parameters = [nn.Parameter(view) for view in views(self.values, tensors)]
        for parameter, view in zip(self.parameters, views(self.gradients, tensors), strict=True):
            parameter.grad = view


class FlatBucket:
    """A part of a flat model, which is stepped alone when its gradients have arrived.

    The fused step's `grad_scale` divides the sum by the number of ranks, which saves a pass over the
    gradients.

    Args:
        optimizer: A name from `OPTIMIZERS`.
        values: Flat tensor; stepped in place.
        gradients: Flat tensor; holds the sum over the ranks at each step.
        size: Number of ranks.
    """

    def __init__(self, optimizer: str, values: Tensor, gradients: Tensor, size: int) -> None:
        self.values, self.gradients = values, gradients
        self._parameter = nn.Parameter(values)
        self._optimizer = optimizer_of(optimizer, [self._parameter])
        if size > 1:
            # The attribute of GradScaler, by which the fused kernels divide.
            self._optimizer.grad_scale = torch.tensor(float(size))  # type: ignore[attr-defined]

    def step(self) -> None:
        """Steps with the mean."""
        self._parameter.grad = self.gradients
        self._optimizer.step()


def views(flat: Tensor, tensors: Sequence[Dims]) -> list[Tensor]:
    """Returns the tensors of a model as consecutive views of `flat`."""
    parts = torch.split(flat, [prod(dims) for dims in tensors])
    return [part.view(dims) for part, dims in zip(parts, tensors, strict=True)]


def optimizer_of(name: str, parameters: Iterable[nn.Parameter], scale: float = 1.0) -> torch.optim.Optimizer:
    """Returns one of `OPTIMIZERS` for these parameters; `scale` multiplies the learning rate."""
    if name == "adam":
        return torch.optim.Adam(parameters, lr=0.01 * scale, fused=True)
    return torch.optim.SGD(parameters, lr=0.1 * scale, momentum=0.9, fused=True)


def on_server(name: str) -> tuple[str, Hyper]:
    """Returns the name of torch's optimizer and its hyperparameters, for a server."""
    optimizer = optimizer_of(name, [nn.Parameter(torch.empty(0))])
    kind = type(optimizer).__name__
    return kind, hyper_of(optimizer.param_groups[0], kind)


PERIOD = 1021
"""Number of elements after which gradients, and so parameters, repeat."""
_SCATTER = 389
"""Distance in value of neighbouring elements, so that neighbouring blocks rarely look alike."""
_TILE_PERIODS = 256
"""Parameters are compared in pieces that fit into the cache."""


class ExpectedParameters:
    """Computes the expected parameters step by step.

    The gradients are periodic: one period, stepped by torch's own optimizer with the mean, gives every
    element of the model. The period is a prime, which divides no slice, bucket or page, so that a misplaced
    element is detected. The gradients of two elements, or of two ranks, never differ only by a factor, and
    change in every step. So the check detects a misplaced element, a lost rank and a lost step even with
    Adam, which ignores a constant factor.

    Args:
        optimizer: The job's optimizer.
        size: Number of ranks.
        slack: Largest allowed error, as a share of the largest parameter; 0: only rounding errors.
    """

    def __init__(self, optimizer: str, size: int, slack: float = 0.0) -> None:
        self._size = size
        self._slack = slack
        self._pattern = torch.arange(PERIOD) * _SCATTER % PERIOD + 1.0
        self._expected = nn.Parameter(torch.zeros(PERIOD))
        self._optimizer = optimizer_of(optimizer, [self._expected])
        self._step = 0
        self._numel = 0

    def write(self, gradients: Iterable[Tensor], rank: int) -> None:
        """Writes this rank's gradients of the next step into flat tensors, like backward."""
        given = list(gradients)
        period = self._period(rank).to(given[0].device)
        self._numel = sum(gradient.numel() for gradient in given)
        for gradient, start in zip(given, self._starts(given), strict=True):
            turned = period.roll(-start)
            whole = gradient.numel() // PERIOD * PERIOD
            gradient[:whole].view(-1, PERIOD).copy_(turned)
            gradient[whole:].copy_(turned[: gradient.numel() - whole])

    def advance(self) -> None:
        """Takes the step."""
        self._expected.grad = sum(map(self._period, range(self._size)), torch.zeros(())) / self._size
        self._optimizer.step()
        self._step += 1

    def wrong(self, values: Iterable[Tensor]) -> int:
        """Returns the number of wrong elements of flat parameters, in one or more copies of the model."""
        given = [each.cpu() for each in values]
        tile = self._expected.detach().repeat(_TILE_PERIODS + 1)
        return sum(
            self._wrong(part, tile[start : start + part.numel()])
            for each, start in zip(given, self._starts(given), strict=True)
            for part in torch.split(each, _TILE_PERIODS * PERIOD)
        )

    def _period(self, rank: int) -> Tensor:
        weight = 1 + (rank + self._step * (rank + 1)) % 5
        return self._pattern.roll(self._step) * weight

    def _starts(self, tensors: Sequence[Tensor]) -> Iterator[int]:
        """Yields each tensor's start in the period; every copy of the model starts at 0."""
        place = 0
        for tensor in tensors:
            yield place % self._numel % PERIOD
            place += tensor.numel()

    def _wrong(self, found: Tensor, expected: Tensor) -> int:
        if torch.equal(found, expected):  # nearly always true, and ten times faster
            return 0
        if not self._slack:
            return int((~torch.isclose(found, expected, rtol=1e-5, atol=0.0)).sum())
        farthest = self._slack * float(self._expected.detach().abs().max())
        return int((~((found - expected).abs() <= farthest)).sum())  # negated so that NaN counts as wrong


CODED_SLACK = 0.02
"""Share of the largest parameter. An 8-bit codec rounds by up to 1/254 of a block's largest gradient."""


class ResultCheck(Protocol):
    """Checks the result of every step."""

    def write(self, gradients: Iterable[Tensor], rank: int) -> None:
        """Writes a rank's gradients of the next step into flat tensors, like backward."""

    def advance(self) -> None:
        """Computes the expected result of the step."""

    def wrong(self, values: Iterable[Tensor]) -> int:
        """Returns the number of wrong elements of flat parameters."""


class RowMember(ABC):
    """One process of a row.

    Attributes:
        ranks: The ranks whose gradients this process needs: its own rank, or all ranks for a bound.
        check: Checks the results.
    """

    def __init__(self, job: BenchJob, rank: int) -> None:
        self.ranks: Sequence[int] = (rank,)
        self.check = self._check_for(job)
        self._job = job

    def _check_for(self, job: BenchJob) -> ResultCheck:
        return ExpectedParameters(job.optimizer, job.size, CODED_SLACK if job.codec else 0.0)

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

    def close(self) -> None:
        """Leaves the group, by default torch's, if this process is in it."""
        if dist.is_initialized():
            vars(self).clear()  # models go first, see `keep_groups_with_models`
            dist.destroy_process_group()


class FlatRowMember(RowMember):
    """A script with a hand-written exchange: one flat model in buckets, which are stepped one by one.

    Args:
        job: The job.
        rank: This process's rank.
        bucket_bytes: Bucket size; None: the job's.
    """

    def __init__(self, job: BenchJob, rank: int, bucket_bytes: int | None = None) -> None:
        super().__init__(job, rank)
        numel = (bucket_bytes or job.bucket_bytes) // 4
        self._model = FlatModel(job.tensors)
        values, gradients = (torch.split(flat, numel) for flat in (self._model.values, self._model.gradients))
        pairs = zip(values, gradients, strict=True)
        self._buckets = [FlatBucket(job.optimizer, *pair, size=job.size) for pair in pairs]

    def gradients(self, rank: int) -> Sequence[Tensor]:
        return self._model.gradient_parts

    def values(self) -> Sequence[Tensor]:
        return self._model.value_parts


class BenchMember:
    """Takes steps on request, and checks the results.

    Args:
        side: The row's exchange.
        line: The connection to the bench.
    """

    def __init__(self, side: RowMember, line: MemberLine) -> None:
        self._side = side
        self._line = line

    def serve(self) -> None:
        """Serves requests until the bench closes the connection."""
        while True:
            try:
                steps, how = self._line.hear().split()
            except ConnectionLost:
                return
            seconds = [self._step(together=how == "together") for _ in range(int(steps))]
            wrong = self._side.check.wrong(self._side.values())
            reply = {"seconds": seconds, "wrong": wrong, "digest": self._side.digest()}
            self._line.tell(json.dumps(reply))

    def _step(self, *, together: bool) -> float:
        for rank in self._side.ranks:
            self._side.check.write(self._side.gradients(rank), rank)
        self._side.prepare()
        self._side.await_device()  # queued work is not part of the step
        if together:
            self._await("ready")
        began = time.perf_counter()
        self._side.step()
        self._side.await_device()
        seconds = time.perf_counter() - began
        if together:
            self._await("stepped")
        self._side.check.advance()
        return seconds

    def _await(self, state: str) -> None:
        """Sends the state, and blocks until all ranks have sent it."""
        self._line.tell(state)
        self._line.hear()


def main() -> None:
    """Runs a member until the bench closes the connection."""
    side, argument, rank = sys.argv[1:]
    job = BenchJob.decode(argument)
    module, _, name = side.partition(":")
    exchange: RowMember = getattr(import_module(module), name)(job, int(rank))
    BenchMember(exchange, MemberLine.dial(job.control)).serve()
    exchange.close()


if __name__ == "__main__":
    main()

"""PowerSGD: the mean of a bucket's gradients by two means of small factors (Vogels et al., NeurIPS 2019).

Every matrix M (gradient and what was left over; n x m) is sent as P and Q, of n x r
and m x r, after one step of the power iteration:

    P = M Q          mean over all ranks, then made orthonormal
    Q = M' P         mean over all ranks, and the next step's first guess
    P Q'             is the mean gradient; what it misses of M is left over for the next step

Both products are linear in M, so the mean of factors is the factor of the mean.
What is no matrix, or would not get smaller, travels uncompressed with P.

The law: every rank makes the same gradient of the same means, bit for bit. Nothing
would ever bring parameters together again that had drifted apart, and torch's QR
and matrix product round differently from one number of threads, or kind of
processor, to another. So both are spelled here in operations that have but one
result: additions and products element by element, and sums in one order. What
goes into a mean, P and Q, each rank may compute as it is fastest.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from hubring.ps.core.types import BucketSpec, TensorSpec
from hubring.ps.core.work import Work
from hubring.workers.buckets.pinning import Allocate

_CACHED = 1 << 16
"""Elements of a product that are made together."""


class _Matrix(NamedTuple):
    """One parameter's views: of what is due, of the gradient, and of the factors."""

    due: Tensor
    gradient: Tensor
    p: Tensor
    q: Tensor


class LowRankMean:
    """One bucket's exchange.

    Attributes:
        phases: The two flat tensors of which the topology takes the mean over all ranks, in place:
            the Ps with what travels uncompressed, then the Qs (empty where there is no matrix).
        specs: What the hub is to hold for each phase.

    Args:
        spec: The bucket's.
        gradients: Its flat gradients in host memory; the mean is written there.
        rank: Columns of the factors.
        allocate: Makes the tensors that travel.
    """

    def __init__(self, spec: BucketSpec, gradients: Tensor, rank: int, allocate: Allocate) -> None:
        self._what = f"the exchange of bucket {spec.index}"
        self._seed = spec.index
        self._gradients = gradients
        wide = torch.float32 if gradients.dtype.itemsize < 4 else gradients.dtype
        self._due = torch.zeros(spec.numel, dtype=wide)
        self._result = gradients if gradients.dtype == wide else torch.zeros_like(self._due)
        self.specs = _phase_specs(spec, rank, str(wide).removeprefix("torch."))
        self.phases = tuple(allocate(phase.numel, wide) for phase in self.specs)
        self._rest: list[tuple[Tensor, Tensor, Tensor]] = []
        self._matrices: list[_Matrix] = []
        self._carve(spec, rank)
        self._guess()

    def exchange(self, mean: Callable[[int], Work]) -> Work:
        """Replaces the gradients by their mean over all ranks.

        The second phase begins in the thread that ends the first.

        Args:
            mean: Starts the mean of `phases[i]`, in place.
        """
        whole = Work(self._what)

        def begin(phase: int, then: Callable[[], None]) -> None:
            def ended(work: Work) -> None:
                try:
                    work.wait(0)  # raises what it failed with
                    torch.get_num_threads()  # a thread that never asked has MKL take every core (torch 2.13)
                    then()
                except Exception as error:  # whatever it is, somebody waits for this exchange
                    whole.fail(error)

            mean(phase).when_done(ended)

        def refine() -> None:
            self.refine()
            begin(1, rebuild)

        def rebuild() -> None:
            self.rebuild()
            whole.complete_part()

        self.project()
        begin(0, refine)
        return whole

    def project(self) -> None:
        """Makes the Ps, from the gradients and what was left over."""
        self._due.add_(self._gradients.to(self._due.dtype))
        for due, _, travelling in self._rest:
            travelling.copy_(due)
            due.zero_()
        for matrix in self._matrices:
            torch.mm(matrix.due, matrix.q, out=matrix.p)

    def refine(self) -> None:
        """Makes the Qs, from the mean of the Ps."""
        for matrix in self._matrices:
            matrix.p.copy_(_basis(matrix.p))
            torch.mm(matrix.due.t(), matrix.p, out=matrix.q)

    def rebuild(self) -> None:
        """Makes the gradients, from the mean of the Qs, and keeps what is left over."""
        for _, result, travelled in self._rest:
            result.copy_(travelled)
        for matrix in self._matrices:
            _multiply(matrix.p, matrix.q, matrix.gradient)
            matrix.due.sub_(matrix.gradient)
        if self._result is not self._gradients:
            self._gradients.copy_(self._result)
        if not isfinite(float(self.phases[1].sum())):
            # The gradients say so, and the step is everybody's to skip; the next one begins afresh.
            self._due.zero_()
            self._guess()

    def _carve(self, spec: BucketSpec, rank: int) -> None:
        """Lays the views, in the order of the bucket's tensors."""
        offset = first = second = 0
        for tensor in spec.tensors:
            whole = slice(offset, offset + tensor.numel)
            offset = whole.stop
            due, result = self._due[whole], self._result[whole]
            if not _shrinks(tensor, rank):
                self._rest.append((due, result, self.phases[0][first : first + tensor.numel]))
                first += tensor.numel
                continue
            rows, columns = _sides(tensor)
            p = self.phases[0][first : first + rows * rank].view(rows, rank)
            q = self.phases[1][second : second + columns * rank].view(columns, rank)
            self._matrices.append(_Matrix(due.view(rows, columns), result.view(rows, columns), p, q))
            first, second = first + rows * rank, second + columns * rank

    def _guess(self) -> None:
        """The same first Qs on every rank."""
        self.phases[1].normal_(generator=torch.Generator().manual_seed(self._seed))


def _basis(matrix: Tensor) -> Tensor:
    """Orthonormal columns that span the matrix's, by Householder's reflections in float64.

    They are that whatever the matrix is, so that a guess of zeros (of a layer
    that had no gradient yet) is not kept for ever.
    """
    rest, mirrors = matrix.to(torch.float64, copy=True), []
    for column in range(matrix.shape[1]):
        mirror = rest[column:, column].clone()
        mirror[0] += torch.copysign(_total(mirror * mirror).sqrt(), mirror[0])
        square = _total(mirror * mirror)
        mirrors.append(mirror * (2 / square).sqrt() if square != 0 else mirror)
        _reflect(rest[column:], mirrors[-1])
    basis = torch.eye(*matrix.shape, dtype=torch.float64)
    for column in reversed(range(matrix.shape[1])):
        _reflect(basis[column:], mirrors[column])
    return basis


def _reflect(rows: Tensor, mirror: Tensor) -> None:
    """In place; `mirror` is normal to the mirror, and of length sqrt(2), or zero for no reflection."""
    normal = mirror.unsqueeze(1)
    rows.sub_(normal * _total(rows * normal))


def _total(rows: Tensor) -> Tensor:
    """The sum along the first dimension, in order: a cumulative sum has no other."""
    return rows.cumsum(0)[-1]


def _multiply(p: Tensor, q: Tensor, into: Tensor) -> None:
    """P Q', a column of both at a time, in parts that stay in the cache."""
    first, *others = range(p.shape[1])
    columns = q.t().contiguous()
    rows = max(1, _CACHED // q.shape[0])
    scratch = torch.empty_like(into[:rows])
    for begin in range(0, len(p), rows):
        left, part = p[begin : begin + rows], into[begin : begin + rows]
        torch.mul(left[:, first, None], columns[first], out=part)
        for each in others:
            # Not addcmul, which may or may not round in between.
            part.add_(torch.mul(left[:, each, None], columns[each], out=scratch[: len(part)]))


def _phase_specs(spec: BucketSpec, rank: int, dtype: str) -> tuple[BucketSpec, BucketSpec]:
    """What travels of a bucket, as buckets; their indices are those of two for every one."""
    first, second = [], []
    for tensor in spec.tensors:
        if _shrinks(tensor, rank):
            rows, columns = _sides(tensor)
            first.append(TensorSpec(f"{tensor.name}:P", (rows, rank)))
            second.append(TensorSpec(f"{tensor.name}:Q", (columns, rank)))
        else:
            first.append(tensor)
    name = f"powersgd:{rank}"
    return (
        BucketSpec(2 * spec.index, dtype, spec.group, "", tuple(first), name),
        BucketSpec(2 * spec.index + 1, dtype, spec.group, "", tuple(second), name),
    )


def _sides(tensor: TensorSpec) -> tuple[int, int]:
    """Rows and columns: a kernel's first dimension against all others."""
    return tensor.shape[0], tensor.numel // tensor.shape[0]


def _shrinks(tensor: TensorSpec, rank: int) -> bool:
    if len(tensor.shape) < 2 or not tensor.numel:
        return False
    rows, columns = _sides(tensor)
    return (rows + columns) * rank < tensor.numel

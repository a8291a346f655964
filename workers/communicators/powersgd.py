"""PowerSGD: the mean of a bucket's gradients from two means of small factors (Vogels et al., NeurIPS 2019).

Each n x m matrix M (gradient plus residual) is sent as P (n x r) and Q (m x r), after one
step of the power iteration:

    P = M Q          averaged over all ranks, then made orthonormal
    Q = M' P         averaged over all ranks; also the first guess of the next step
    P Q'             is the mean gradient; M - P Q' is the residual for the next step

Both products are linear in M, so the mean of the factors is the factor of the mean.
Tensors that are no matrices, or would not get smaller, are sent uncompressed with P.

Invariant: from the same means every rank computes the same gradient, bit for bit. Parameters
that differ between ranks would never become equal again. torch's QR and matrix product round
differently with the number of threads and the CPU. So this file computes both with operations
whose result is unique: elementwise additions and products, and sums in one order. P and Q
themselves are inputs of a mean, so each rank may compute them in the fastest way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from hubring.ps.core.types import BucketSpec, TensorSpec
from hubring.ps.core.work import Work
from hubring.workers.buckets.staging import Allocate
from hubring.workers.communicators.residuals import Residual, residuals_in

_CACHED = 1 << 16
"""Elements of a product that are computed together, to stay in the cache."""


class _Matrix(NamedTuple):
    """One parameter's views: gradient plus residual (`due`), and factors.

    `position` is the parameter's position in the bucket, `part` its place in the bucket's flat gradients.
    """

    position: int
    part: slice
    due: Tensor
    p: Tensor
    q: Tensor


class LowRankMean:
    """One bucket's exchange.

    Attributes:
        phases: Two flat tensors that the topology averages over all ranks, in place: the Ps with the
            uncompressed tensors, then the Qs (empty if there is no matrix).
        specs: The hub's bucket for each phase.

    Args:
        spec: The bucket's spec.
        dtype: The gradients' dtype.
        rank: Number of columns of the factors.
        allocate: Makes the tensors to send.
    """

    def __init__(self, spec: BucketSpec, dtype: torch.dtype, rank: int, allocate: Allocate) -> None:
        self._what = f"the exchange of bucket {spec.index}"
        self._spec, self._seed = spec, spec.index
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        self._due = torch.zeros(spec.numel, dtype=wide, device="cpu")
        self._wide = None if dtype == wide else torch.zeros_like(self._due)
        """The mean, if the gradients are in half precision."""
        self.specs = _phase_specs(spec, rank, str(wide).removeprefix("torch."))
        self.phases = tuple(allocate(phase.numel, wide) for phase in self.specs)
        self._rest: list[tuple[slice, Tensor, Tensor]] = []
        self._matrices: list[_Matrix] = []
        self._make_views(spec, rank)
        self._guess()

    def exchange(
        self,
        gradients: Tensor,
        mean: Callable[[int], Work],
        absent: Callable[[], Collection[int]] = frozenset,
    ) -> Work:
        """Replaces the gradients with their mean over all ranks.

        The second phase starts in the thread that ends the first.

        Args:
            gradients: The bucket's flat gradients in host memory.
            mean: Starts the mean of `phases[i]`, in place.
            absent: Returns, after the means, the positions of the parameters without a gradient on every
                rank. They get no update, so their residual stays as it is.
        """
        whole = Work(self._what)

        def begin(phase: int, then: Callable[[], None]) -> None:
            def ended(work: Work) -> None:
                try:
                    work.wait(0)  # raises the phase's error
                    torch.get_num_threads()  # otherwise MKL uses every core in this thread (torch 2.13)
                    then()
                except Exception as error:  # any error: a caller waits for this exchange
                    whole.fail(error)

            mean(phase).when_done(ended)

        def refine() -> None:
            self.refine()
            begin(1, rebuild)

        def rebuild() -> None:
            self.rebuild(gradients, absent())
            whole.complete_part()

        self.project(gradients)
        begin(0, refine)
        return whole

    def residuals(self, prefix: str = "") -> list[Residual]:
        """Returns the residuals, and the first guess of the next step, which all ranks have alike."""
        names = [f"{prefix}{tensor.name}" for tensor in self._spec.tensors]
        guesses = [
            Residual(f"{names[one.position]}:Q", one.q.numel(), slice(0, one.q.numel()), one.q.view(-1))
            for one in self._matrices
        ]
        return [*residuals_in(self._due, 0, self._spec.tensors, prefix), *guesses]

    def project(self, gradients: Tensor) -> None:
        """Computes the Ps from the gradients and the residuals."""
        self._due.add_(gradients.to(self._due.dtype))
        for _, due, travelling in self._rest:
            travelling.copy_(due)
            due.zero_()
        for matrix in self._matrices:
            torch.mm(matrix.due, matrix.q, out=matrix.p)

    def refine(self) -> None:
        """Computes the Qs from the mean of the Ps."""
        for matrix in self._matrices:
            matrix.p.copy_(_basis(matrix.p))
            torch.mm(matrix.due.t(), matrix.p, out=matrix.q)

    def rebuild(self, gradients: Tensor, absent: Collection[int] = ()) -> None:
        """Computes the mean gradients from the mean of the Qs, and the residuals of all but the `absent`."""
        result = gradients if self._wide is None else self._wide
        for part, _, travelled in self._rest:
            result[part].copy_(travelled)
        for matrix in self._matrices:
            mean = result[matrix.part].view_as(matrix.due)
            _multiply(matrix.p, matrix.q, mean)
            if matrix.position not in absent:
                matrix.due.sub_(mean)
        if self._wide is not None:
            gradients.copy_(self._wide)
        if not isfinite(float(self.phases[1].sum())):
            # The mean gradients are not finite either, so all ranks can skip the step. Reset the state.
            self._due.zero_()
            self._guess()

    def _make_views(self, spec: BucketSpec, rank: int) -> None:
        """Makes the views, in the order of the bucket's tensors."""
        firsts, seconds = (
            iter(torch.split(phase, [tensor.numel for tensor in its.tensors]))
            for phase, its in zip(self.phases, self.specs, strict=True)
        )
        start = 0
        for position, (tensor, first) in enumerate(zip(spec.tensors, firsts, strict=True)):
            part = slice(start, start + tensor.numel)
            start = part.stop
            due = self._due[part]
            if _shrinks(tensor, rank):
                due, p = due.view(_sides(tensor)), first.view(-1, rank)
                self._matrices.append(_Matrix(position, part, due, p, next(seconds).view(-1, rank)))
            else:
                self._rest.append((part, due, first))

    def _guess(self) -> None:
        """Sets the first Qs, the same on every rank."""
        self.phases[1].normal_(generator=torch.Generator().manual_seed(self._seed))


def _basis(matrix: Tensor) -> Tensor:
    """Returns an orthonormal basis of the matrix's columns, by Householder reflections in float64.

    The result is orthonormal even for a matrix of zeros. Otherwise a layer without a gradient in one
    step would have zero factors in all later steps.
    """
    rest, mirrors = matrix.to(torch.float64, copy=True), []
    for column in range(matrix.shape[1]):
        mirror = rest[column:, column].clone()
        mirror[0] += torch.copysign(_total(mirror * mirror).sqrt(), mirror[0])
        square = _total(mirror * mirror)
        mirrors.append(mirror * (2 / square).sqrt() if square != 0 else mirror)
        _reflect(rest[column:], mirrors[-1])
    basis = torch.eye(*matrix.shape, dtype=torch.float64, device="cpu")
    for column in reversed(range(matrix.shape[1])):
        _reflect(basis[column:], mirrors[column])
    return basis


def _reflect(rows: Tensor, mirror: Tensor) -> None:
    """Reflects rows in place. `mirror` is the normal, of length sqrt(2), or zero for no reflection."""
    normal = mirror.unsqueeze(1)
    rows.sub_(normal * _total(rows * normal))


def _total(rows: Tensor) -> Tensor:
    """Returns the sum along the first dimension. A cumulative sum has a defined order."""
    return rows.cumsum(0)[-1]


def _multiply(p: Tensor, q: Tensor, into: Tensor) -> None:
    """Writes P Q' to `into`, one column of both at a time, in parts that stay in the cache."""
    first, *others = range(p.shape[1])
    columns = q.t().contiguous()
    rows = max(1, _CACHED // q.shape[0])
    scratch = torch.empty_like(into[:rows])
    for begin in range(0, len(p), rows):
        left, part = p[begin : begin + rows], into[begin : begin + rows]
        torch.mul(left[:, first, None], columns[first], out=part)
        for each in others:
            # Not addcmul: whether it rounds the product depends on the CPU.
            part.add_(torch.mul(left[:, each, None], columns[each], out=scratch[: len(part)]))


def _phase_specs(spec: BucketSpec, rank: int, dtype: str) -> tuple[BucketSpec, BucketSpec]:
    """Returns the specs of a bucket's two phases, with indices 2i and 2i + 1 for bucket i."""
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
        BucketSpec(2 * spec.index, dtype, "", tuple(first), name),
        BucketSpec(2 * spec.index + 1, dtype, "", tuple(second), name),
    )


def _sides(tensor: TensorSpec) -> tuple[int, int]:
    """Returns rows and columns: the first dimension, and the product of the others."""
    return tensor.shape[0], tensor.numel // tensor.shape[0]


def _shrinks(tensor: TensorSpec, rank: int) -> bool:
    if len(tensor.shape) < 2 or not tensor.numel:
        return False
    rows, columns = _sides(tensor)
    return (rows + columns) * rank < tensor.numel

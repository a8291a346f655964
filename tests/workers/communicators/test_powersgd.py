"""PowerSGD on one rank or several, whose means are taken by hand."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from torch import Tensor

from hubring.ps.core.errors import RingBroken
from hubring.ps.core.types import BucketSpec, TensorSpec
from hubring.ps.core.work import Work
from hubring.workers.communicators.powersgd import LowRankMean, _basis

SPEC = BucketSpec(
    3, "float32", "", (TensorSpec("w", (20, 6, 5)), TensorSpec("b", (20,)), TensorSpec("v", (2, 2)))
)


class Rank(LowRankMean):
    """One rank and its gradients."""

    def __init__(self, spec: BucketSpec, gradients: Tensor, rank: int) -> None:
        super().__init__(spec, gradients.dtype, rank, lambda numel, dtype: torch.zeros(numel, dtype=dtype))
        self.gradients = gradients


def ranks_of(gradients: list[Tensor], rank: int, spec: BucketSpec = SPEC) -> list[Rank]:
    return [Rank(spec, gradient, rank) for gradient in gradients]


def average(ranks: list[Rank], phase: int) -> None:
    mean = torch.stack([rank.phases[phase] for rank in ranks]).mean(0)
    for rank in ranks:
        rank.phases[phase].copy_(mean)


def step(ranks: list[Rank], absent: Collection[int] = ()) -> None:
    for rank in ranks:
        rank.project(rank.gradients)
    average(ranks, 0)
    for rank in ranks:
        rank.refine()
    average(ranks, 1)
    for rank in ranks:
        rank.rebuild(rank.gradients, absent)


def random(seed: int, numel: int = SPEC.numel) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def low_rank(seed: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(20, rank, generator=generator) @ torch.randn(rank, 30, generator=generator)
    return torch.cat([matrix.flatten(), random(seed, 24)])


def test_a_mean_of_low_rank_is_exact_after_one_step() -> None:
    gradients = [low_rank(1, 1), low_rank(2, 1)]
    mean = torch.stack(gradients).mean(0)
    ranks = ranks_of(gradients, 2)
    step(ranks)
    for gradient in gradients:
        torch.testing.assert_close(gradient, mean, rtol=1e-4, atol=1e-5)


def test_ranks_with_other_numbers_of_threads_get_the_same_gradient() -> None:
    """Tall enough for torch's own QR to differ between one thread and two."""
    spec = BucketSpec(0, "float32", "", (TensorSpec("w", (30_000, 16)),))
    gradients = [random(seed, spec.numel) for seed in range(2)]
    ranks, usual = ranks_of(gradients, 4, spec), torch.get_num_threads()
    try:
        for phase in ("project", "refine", "rebuild"):
            for threads, rank in enumerate(ranks, start=1):
                torch.set_num_threads(threads)
                getattr(rank, phase)(*[rank.gradients] * (phase != "refine"))
            if phase != "rebuild":
                average(ranks, 0 if phase == "project" else 1)
            assert torch.equal(ranks[0].phases[0], ranks[1].phases[0]) or phase == "project"
    finally:
        torch.set_num_threads(usual)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("kind", ["random", "zero", "parallel columns", "huge", "tiny"])
def test_a_basis_is_orthonormal_whatever_it_is_made_of(kind: str) -> None:
    matrix = random(0, 40 * 4).view(40, 4)
    scales = {"zero": 0.0, "huge": 1e30, "tiny": 1e-30}
    matrix *= scales.get(kind, 1.0)
    if kind == "parallel columns":
        matrix[:, 1:] = matrix[:, :1]
    basis = _basis(matrix)
    torch.testing.assert_close(basis.t() @ basis, torch.eye(4, dtype=torch.float64))
    if kind in ("random", "huge", "tiny"):  # spans what the matrix spans
        wide = matrix.double()
        torch.testing.assert_close(basis @ (basis.t() @ wide), wide)


def test_powersgd_sends_the_compression_error_later() -> None:
    gradients = [torch.zeros(SPEC.numel) for _ in range(2)]
    ranks = ranks_of(gradients, 2)
    means, given, arrived = [], torch.zeros(SPEC.numel), torch.zeros(SPEC.numel)
    constant = [random(1), random(2)]
    for _ in range(60):
        for gradient, one in zip(gradients, constant, strict=True):
            gradient.copy_(one)
        given += torch.stack(gradients).mean(0)
        step(ranks)
        arrived += gradients[0]
        means.append(gradients[0].clone())
    assert (means[0] - torch.stack(constant).mean(0)).norm() > 1  # one step alone misses much
    assert (arrived - given).norm() / given.norm() < 0.1


def test_the_warm_start_finds_the_largest_directions() -> None:
    """With the same matrix every step, and nothing left over, the power iteration converges to the best."""
    gradient = random(5)
    (rank,) = ranks_of([gradient], 2)
    for _ in range(40):
        gradient.copy_(random(5))
        rank._due.zero_()
        step([rank])
    matrix = random(5)[:600].view(20, 30)
    best = torch.linalg.svdvals(matrix)[2:].norm()
    assert (gradient[:600].view(20, 30) - matrix).norm() < best * 1.02


def test_a_layer_without_a_gradient_at_first_is_not_without_one_for_ever() -> None:
    gradient = torch.zeros(SPEC.numel)
    (rank,) = ranks_of([gradient], 2)
    for _ in range(3):
        step([rank])
        assert not gradient.any()
    arrived = torch.zeros(600)
    for _ in range(2):  # the first step finds where to look, the second brings it all
        gradient.copy_(low_rank(1, 1))
        step([rank])
        arrived += gradient[:600]
    torch.testing.assert_close(arrived, 2 * low_rank(1, 1)[:600], rtol=1e-4, atol=1e-4)


def test_a_phase_that_fails_fails_the_exchange() -> None:
    (rank,) = ranks_of([random(0)], 2)
    phases = [Work("first"), Work("second")]
    work = rank.exchange(rank.gradients, lambda phase: phases[phase])
    assert not work.done
    phases[0].complete_part()
    assert not work.done
    phases[1].fail(RingBroken("rank 1 is gone"))
    with pytest.raises(RingBroken, match="rank 1 is gone"):
        work.wait(0)


def test_the_residual_of_a_matrix_without_a_gradient_waits() -> None:
    ranks = ranks_of([random(1), random(2)], 1)
    step(ranks)
    gradients = [rank.gradients for rank in ranks]
    before = [rank._due.clone() for rank in ranks]
    for gradient in gradients:
        gradient.zero_()
    step(ranks, absent={0})
    for rank, due in zip(ranks, before, strict=True):
        assert due[:600].any()
        assert torch.equal(rank._due, due)

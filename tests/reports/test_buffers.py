"""Scripts whose models have buffers of an unusual kind, or buffers that differ between ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hubring.ps.core.errors import HubringError
from tests.reports.training import (
    RANKS,
    Job,
    Topology,
    assert_as_torch,
    batches,
    ends,
    mlp,
    momentum,
    seeded,
    step,
    topologies,
    values,
)

SEVERAL = "hub aggregate ring"


class Buffered(nn.Module):
    """A linear layer behind a batch normalisation, with a further buffer."""

    def __init__(self, buffer: Tensor | None, persistent: bool = True) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("more", buffer, persistent)

    def forward(self, batch: Tensor) -> Tensor:
        return self.layer(self.norm(batch))


def expanded() -> Tensor:
    return torch.tensor([[2.0]]).expand(3, 4)


def complex_phases() -> Tensor:
    return torch.polar(torch.ones(3), torch.arange(3.0))


def conjugated() -> Tensor:
    return complex_phases().conj()


def sparse() -> Tensor:
    return torch.eye(3).to_sparse()


def transposed() -> Tensor:
    return torch.arange(6.0).view(2, 3).T


def flags() -> Tensor:
    return torch.tensor([True, False])


def half() -> Tensor:
    return torch.ones(3, dtype=torch.float16)


def empty() -> Tensor:
    return torch.empty(0, 4)


def scalar() -> Tensor:
    return torch.tensor(7, dtype=torch.int32)


KINDS = [expanded, complex_phases, conjugated, sparse, transposed, flags, half, empty, scalar]


@topologies()
@pytest.mark.parametrize("make", KINDS)
def test_a_model_has_a_buffer_of_any_kind(topology: Topology, make: object) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(lambda: Buffered(make()))  # type: ignore[operator]
        # Where rank 0 cannot send its buffer, the other rank waits until the timeout.
        optimizer = job.wrap(momentum(model), model, timeout=3.0)
        for batch in batches():
            step(job, model, optimizer, batch)
        more = model.get_buffer("more")
        return [*values(model), more.to_dense().resolve_conj().clone()]

    assert_as_torch(topology, script, refusal="more")


@topologies()
def test_buffers_start_as_those_of_rank_0(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        rank = job.ranks[0]
        model = seeded(lambda: Buffered(torch.full((3,), float(rank))))
        model.norm.running_mean.fill_(rank)  # type: ignore[union-attr]
        job.wrap(momentum(model), model)
        return [one.clone() for one in model.buffers()]

    assert_as_torch(topology, script)


@topologies(on=SEVERAL)
@pytest.mark.parametrize("persistent", [True, False])
def test_masks_that_differ_in_shape_are_refused_by_name(topology: Topology, persistent: bool) -> None:
    def script(job: Job) -> list[Tensor]:
        length = 3 + job.ranks[0]
        model = seeded(lambda: Buffered(torch.ones(length, length).tril(), persistent))
        job.wrap(momentum(model), model)
        return []

    with pytest.raises(HubringError, match=r"more.*rank|rank.*more"):
        ends(topology, script)


@topologies(on=SEVERAL)
def test_buffers_that_differ_in_type_are_refused_by_name(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        dtype = torch.float16 if job.ranks[0] else torch.float32
        model = seeded(lambda: Buffered(torch.ones(4, dtype=dtype)))
        job.wrap(momentum(model), model)
        return []

    with pytest.raises(HubringError, match=r"more.*rank|rank.*more"):
        ends(topology, script)


@topologies(on=SEVERAL)
def test_frozen_parameters_that_differ_in_shape_are_refused_by_name(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        trained, frozen = nn.Linear(4, 2), nn.Linear(4, 2 + job.ranks[0]).requires_grad_(False)
        model = nn.ModuleDict({"trained": trained, "frozen": frozen})
        job.wrap(momentum(trained), model)
        return []

    with pytest.raises(HubringError, match="frozen"):
        ends(topology, script)


@topologies()
def test_a_buffer_is_made_anew_in_every_forward(topology: Topology) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, batch: Tensor) -> Tensor:
            self.seen = self.get_buffer("seen") + 1
            return self.layer(batch) * self.seen

    def script(job: Job) -> list[Tensor]:
        model = seeded(Counting)
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            optimizer.zero_grad()
            job.loss(batch, lambda part: (model(part) / model.get_buffer("seen")).square().mean()).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_a_model_with_a_buffer_runs_twice_before_backward(topology: Topology) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("scale", torch.full((1, 4), 0.5))

        def forward(self, batch: Tensor) -> Tensor:
            return self.layer(batch) * self.scale

    def script(job: Job) -> list[Tensor]:
        model = seeded(Scaled)
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            step(job, lambda part: model(model(part)), optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_sync_batch_norm_sees_the_batches_of_all_ranks(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(
            lambda: nn.SyncBatchNorm.convert_sync_batchnorm(
                nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
            )
        )
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            optimizer.zero_grad()
            model(torch.cat(job.parts(batch))).square().mean().backward()
            optimizer.step()
        return [*values(model), *[one.clone() for one in model.buffers()]]

    assert_as_torch(topology, script, refusal="SyncBatchNorm")


class Codebook(nn.Module):
    """Subtracts a running mean of its input, as codebooks and centring layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, batch: Tensor) -> Tensor:
        centre = self.get_buffer("centre")
        result = self.layer(batch - centre.clone())
        centre.lerp_(batch.detach().mean(0), 0.5)
        return result


@topologies(on=SEVERAL)
def test_a_running_mean_is_that_of_rank_0_in_every_forward(topology: Topology) -> None:
    """As under DistributedDataParallel, which copies rank 0's buffers before each forward."""

    def reference() -> list[Tensor]:
        model = seeded(Codebook)
        optimizer = momentum(model)
        for batch in batches():
            optimizer.zero_grad()
            begin = model.get_buffer("centre").clone()
            parts = batch.chunk(RANKS)
            outputs = []
            for part in reversed(parts):
                model.get_buffer("centre").copy_(begin)
                outputs.append(model(part).square().mean())
            torch.stack(outputs).mean().backward()
            optimizer.step()
        return values(model)

    def script(job: Job) -> list[Tensor]:
        model = seeded(Codebook)
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    for one in ends(topology, script):
        torch.testing.assert_close(one, reference())


@topologies()
def test_batch_norm_is_frozen_by_eval_and_its_statistics_stay(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
        model[1].eval()
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return [*values(model), *[one.clone() for one in model.buffers()]]

    assert_as_torch(topology, script)


@topologies()
def test_the_models_statistics_are_averaged_by_the_script(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        model.register_buffer("mean", torch.zeros(4))
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
            mean = job.mean_over_ranks(torch.cat(job.parts(batch)).mean(0))
            model.get_buffer("mean").lerp_(mean, 0.5)
        return [*values(model), model.get_buffer("mean").clone()]

    assert_as_torch(topology, script)

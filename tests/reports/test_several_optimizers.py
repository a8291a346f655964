"""Several optimizers, of which some share parameters."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.reports.report import report
from tests.reports.training import Job, adam, batches, mlp, momentum, prepared, seeded, square, take, values


def adversaries() -> tuple[nn.Module, nn.Module]:
    return seeded(lambda: (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), nn.Linear(4, 4)))


def judge_loss(job: Job, judge: nn.Module, forger: nn.Module, batch: Tensor) -> Tensor:
    return job.loss(batch, lambda part: (judge(part) - judge(forger(part).detach())).mean())


def forge_loss(job: Job, judge: nn.Module, forger: nn.Module, batch: Tensor) -> Tensor:
    return job.loss(batch, lambda part: judge(forger(part)).square().mean())


@report("Lightning-AI/pytorch-lightning#20328, Lightning-AI/pytorch-lightning#20866")
@pytest.mark.parametrize("toggles", [True, False], ids=["toggles", "drops"])
def test_the_discriminator_is_frozen_while_the_generator_trains(job: Job, toggles: bool) -> list[Tensor]:
    """GAN: toggles `requires_grad`, or drops gradients."""
    judge, forger = adversaries()
    judging, forging = job.wrap(momentum(judge), judge), job.wrap(momentum(forger), forger)
    for batch in batches():
        judge.requires_grad_(not toggles)
        judging.zero_grad()
        forge_loss(job, judge, forger, batch).backward()
        forging.step()
        judge.requires_grad_(True)
        forger.requires_grad_(not toggles)
        judge.zero_grad()
        forging.zero_grad()
        judge_loss(job, judge, forger, batch).backward()
        judging.step()
        forger.requires_grad_(True)
    return values(judge, forger)


@report("WGAN scripts")
def test_a_critic_with_clipped_weights_steps_twice_as_often(job: Job) -> list[Tensor]:
    """Critic with weight clipping."""
    judge, forger = adversaries()
    judging = job.wrap(torch.optim.RMSprop(judge.parameters(), lr=0.01), judge)
    forging = job.wrap(torch.optim.RMSprop(forger.parameters(), lr=0.01), forger)
    for turn, batch in enumerate(batches()):
        take(judging, judge_loss(job, judge, forger, batch))
        for parameter in judge.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        if turn % 2:
            take(forging, forge_loss(job, judge, forger, batch))
    return values(judge, forger)


@report("horovod/horovod#1549, horovod/horovod#1417")
@pytest.mark.parametrize("turns", [False, True], ids=["together", "in turns"])
def test_two_optimizers_step_after_one_backward(job: Job, turns: bool) -> list[Tensor]:
    """Two optimizers, one loss: both step, or take turns."""
    model = mlp()
    trunk, head = model[0], model[2]
    optimizers: list[Optimizer] = [job.wrap(momentum(trunk), trunk), job.wrap(adam(head), head)]
    for turn, batch in enumerate(batches()):
        for optimizer in optimizers:
            optimizer.zero_grad()
        job.loss(batch, square(model)).backward()
        for optimizer in optimizers[turn % 2 :][:1] if turns else optimizers:
            optimizer.step()
    return values(model)


@report("pytorch/pytorch#51794", error="a later DistributedOptimizer", refused="hub")
def test_two_optimizers_share_an_encoder(job: Job) -> list[Tensor]:
    """Two optimizers hold the same encoder."""
    encoder, *heads = seeded(lambda: [nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)])
    both = nn.ModuleList([encoder, *heads])
    optimizers = [
        job.wrap(
            torch.optim.SGD(itertools.chain(encoder.parameters(), head.parameters()), lr=0.1, momentum=0.9),
            nn.ModuleList([encoder, head]),
        )
        for head in heads
    ]
    for batch in batches():
        for head, optimizer in zip(heads, optimizers, strict=True):
            job.step(optimizer, batch, square(nn.Sequential(encoder, head)))
    return values(both)


@report("Uncertainty weighting")
def test_a_learned_loss_weight_has_a_local_optimizer(job: Job) -> list[Tensor]:
    """One optimizer is wrapped, another is not.

    Only the model's optimizer is wrapped; the weight has the same value on all ranks anyway.
    """
    model, weight = mlp(), nn.Parameter(torch.tensor(1.0))
    optimizer, own = job.wrap(momentum(model), model), torch.optim.SGD([weight], lr=0.1)
    for batch in batches():
        optimizer.zero_grad()
        own.zero_grad()
        (weight.exp() * job.loss(batch, square(model)) - weight.detach()).backward()
        optimizer.step()
        weight.grad = torch.ones(())
        own.step()
    return [*values(model), weight.detach()]


@report("Fine-tuning")
def test_a_second_optimizer_trains_a_head_that_came_later(job: Job) -> list[Tensor]:
    """Replaces a layer after wrapping, with another optimizer, twice."""
    model, optimizer = prepared(job, mlp())
    model[2] = seeded(lambda: nn.Linear(5, 2))
    for make in (momentum, adam):
        head = job.wrap(make(model[2]), model[2])
        for batch in batches():
            model.zero_grad()
            job.loss(batch, square(model)).backward()
            optimizer.step()
            head.step()
    return values(model)

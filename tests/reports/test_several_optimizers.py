"""Scripts with several optimizers, of which some share parameters."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.reports.training import (
    Job,
    Topology,
    adam,
    assert_as_torch,
    batches,
    mlp,
    momentum,
    seeded,
    square,
    topologies,
    values,
)

SECOND = "second DistributedOptimizer"
"""A hub that steps refuses it, and names aggregate."""


def adversaries() -> tuple[nn.Module, nn.Module]:
    return seeded(lambda: (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), nn.Linear(4, 4)))


def judge_loss(job: Job, judge: nn.Module, forger: nn.Module, batch: Tensor) -> Tensor:
    return job.loss(batch, lambda part: (judge(part) - judge(forger(part).detach())).mean())


def forge_loss(job: Job, judge: nn.Module, forger: nn.Module, batch: Tensor) -> Tensor:
    return job.loss(batch, lambda part: judge(forger(part)).square().mean())


@topologies()
def test_a_generators_backward_goes_through_the_discriminator(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        judge, forger = adversaries()
        forging, judging = job.wrap(adam(forger), forger), job.wrap(adam(judge), judge)
        for batch in batches():
            forging.zero_grad()
            forge_loss(job, judge, forger, batch).backward()
            forging.step()
            judging.zero_grad()
            judge_loss(job, judge, forger, batch).backward()
            judging.step()
        return values(judge, forger)

    assert_as_torch(topology, script, refusal=SECOND)


@topologies()
def test_the_discriminator_is_frozen_while_the_generator_trains(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        judge, forger = adversaries()
        judging, forging = job.wrap(momentum(judge), judge), job.wrap(momentum(forger), forger)
        for batch in batches():
            judge.requires_grad_(False)
            forge_loss(job, judge, forger, batch).backward()
            forging.step()
            forging.zero_grad()
            judge.requires_grad_(True)
            forger.requires_grad_(False)
            judge_loss(job, judge, forger, batch).backward()
            judging.step()
            judging.zero_grad()
            forger.requires_grad_(True)
        return values(judge, forger)

    assert_as_torch(topology, script, refusal=SECOND)


@topologies()
def test_a_critic_with_clipped_weights_steps_twice_as_often(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        judge, forger = adversaries()
        judging = job.wrap(torch.optim.RMSprop(judge.parameters(), lr=0.01), judge)
        forging = job.wrap(torch.optim.RMSprop(forger.parameters(), lr=0.01), forger)
        for turn, batch in enumerate(batches()):
            judging.zero_grad()
            judge_loss(job, judge, forger, batch).backward()
            judging.step()
            for parameter in judge.parameters():
                parameter.data.clamp_(-0.2, 0.2)
            if turn % 2:
                forging.zero_grad()
                forge_loss(job, judge, forger, batch).backward()
                forging.step()
        return values(judge, forger)

    assert_as_torch(topology, script, refusal=SECOND)


@topologies()
def test_two_optimizers_step_after_one_backward(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        trunk, head = model[0], model[2]
        optimizers: list[Optimizer] = [job.wrap(momentum(trunk), trunk), job.wrap(adam(head), head)]
        for batch in batches():
            for optimizer in optimizers:
                optimizer.zero_grad()
            job.loss(batch, lambda part: model(part).square().mean()).backward()
            for optimizer in optimizers:
                optimizer.step()
        return values(model)

    assert_as_torch(topology, script, refusal=SECOND)


@topologies()
def test_two_optimizers_take_turns_and_drop_each_others_gradients(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        trunk, head = model[0], model[2]
        optimizers: list[Optimizer] = [job.wrap(momentum(trunk), trunk), job.wrap(adam(head), head)]
        for turn, batch in enumerate(batches()):
            model.zero_grad()
            job.loss(batch, lambda part: model(part).square().mean()).backward()
            optimizers[turn % 2].step()
        return values(model)

    assert_as_torch(topology, script, refusal=f"{SECOND}|overlap=False")


@topologies()
def test_two_optimizers_share_an_encoder(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        encoder, *heads = seeded(lambda: [nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)])
        both = nn.ModuleList([encoder, *heads])
        optimizers = [
            job.wrap(
                torch.optim.SGD(
                    itertools.chain(encoder.parameters(), head.parameters()), lr=0.1, momentum=0.9
                ),
                nn.ModuleList([encoder, head]),
            )
            for head in heads
        ]
        for batch in batches():
            for head, optimizer in zip(heads, optimizers, strict=True):
                optimizer.zero_grad()
                job.loss(batch, square(nn.Sequential(encoder, head))).backward()
                optimizer.step()
        return values(both)

    assert_as_torch(topology, script, refusal=f"{SECOND}|a later DistributedOptimizer")


@topologies()
def test_a_learned_loss_weight_has_a_local_optimizer(topology: Topology) -> None:
    """Only the model's optimizer is wrapped; the weight has the same value on all ranks anyway."""

    def script(job: Job) -> list[Tensor]:
        model, weight = mlp(), nn.Parameter(torch.tensor(1.0))
        optimizer, own = job.wrap(momentum(model), model), torch.optim.SGD([weight], lr=0.1)
        for batch in batches():
            optimizer.zero_grad()
            own.zero_grad()
            (
                weight.exp() * job.loss(batch, lambda part: model(part).square().mean()) - weight.detach()
            ).backward()
            optimizer.step()
            weight.grad = torch.ones(())
            own.step()
        return [*values(model), weight.detach()]

    assert_as_torch(topology, script)

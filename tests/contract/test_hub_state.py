"""What a script does to parameters, gradients and optimizer state arrives on every kind of hub."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import ReduceOp
from hubring.ps.optim.hyperparameters import hyper_of
from hubring.ps.transport.grpc.transport import GrpcTransport
from hubring.ps.transport.zmq.transport import ZmqTransport
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.bucketing import make_buckets
from hubring.workers.collectives import allreduce
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.hub import PSCommunicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.support.optimizers import CASES, torchs
from tests.support.training.ranks import (
    LIMIT,
    AggregatingRanks,
    HubRanks,
    PlacedAggregatingRanks,
    PlacedRanks,
    StagedAggregatingRanks,
    StagedRanks,
    hub_of,
)

SHAPES = {"a": (5, 16), "b": (3,), "c": (4, 4), "d": (30, 3)}
"""Parameters of one bucket; slices of 64 bytes cut "a" and "d"."""


def kind(base: type[HubRanks], **settings: Any) -> type[HubRanks]:
    return type("Two", (base,), {"size": 2, "slice_bytes": 64, **settings})


STEPPING = {"hub": kind(HubRanks), "staged": kind(StagedRanks), "placed": kind(PlacedRanks)}
AVERAGING = {
    "aggregate": kind(AggregatingRanks),
    "staged aggregate": kind(StagedAggregatingRanks),
    "placed aggregate": kind(PlacedAggregatingRanks),
    "powersgd": kind(AggregatingRanks, compress="powersgd:1"),
    "int8": kind(AggregatingRanks, compress="int8", slice_bytes=1024),
}
WIRES = {"zmq": kind(HubRanks, wire=ZmqTransport), "grpc": kind(HubRanks, wire=GrpcTransport)}


class Trained(NamedTuple):
    """One rank's model in one bucket."""

    communicator: PSCommunicator
    parameters: dict[str, nn.Parameter]
    buckets: list[Bucket]
    optimizer: torch.optim.Optimizer
    name: str

    def step(self, seed: int, absent: frozenset[int] = frozenset()) -> Tensor:
        """Exchanges gradients that differ by rank; returns this rank's."""
        (bucket,) = self.buckets
        source = torch.Generator().manual_seed(10 * seed + self.communicator.rank)
        bucket.gradients.copy_(torch.randn(bucket.spec.numel, generator=source))
        for position in absent:
            bucket.shown.views[position].zero_()
        given = bucket.gradients.clone()
        bucket.absent = absent
        work = self.communicator.push_pull(bucket, hyper_of(self.optimizer.param_groups[0], self.name))
        work.wait(LIMIT)
        bucket.arrive()
        return given


def trained(communicator: Communicator, name: str = "SGD", **options: Any) -> Trained:
    communicator = cast(PSCommunicator, communicator)
    parameters = {each: nn.Parameter(torch.ones(shape)) for each, shape in SHAPES.items()}
    optimizer = torchs(name, list(parameters.values()), options)
    buckets = make_buckets(
        optimizer,
        parameters.items(),
        communicator.allocate,
        1 << 20,
        name if communicator.steps_on == "server" else "",
        communicator.allocate_values,
    )
    return Trained(communicator, parameters, buckets, optimizer, name)


@pytest.mark.parametrize("kind", STEPPING.values(), ids=STEPPING)
def test_a_gradient_absent_on_every_rank_changes_no_values_or_state(kind: type[HubRanks]) -> None:
    def action(communicator: Communicator) -> None:
        model = trained(communicator, "Adam")
        communicator.attach(model.buckets)
        (bucket,) = model.buckets
        absent = [frozenset({1, 2}), frozenset({0, 1})]
        before = bucket.values.clone()
        for seed in range(3):
            model.step(seed, absent[communicator.rank])
        names = [tensor.name for tensor in bucket.spec.tensors]
        state = hub_of(model.communicator).read_state(model.buckets)
        assert set(state) == set(names) - {names[1]}
        assert {float(each["step"]) for each in state.values()} == {3.0}
        for at, (now, then) in enumerate(
            zip(_parts(bucket, bucket.values), _parts(bucket, before), strict=True)
        ):
            assert torch.equal(now, then) == (at == 1), names[at]

    kind.run_once(action)


@pytest.mark.parametrize("kind", AVERAGING.values(), ids=AVERAGING)
def test_where_workers_step_they_learn_what_is_absent_on_every_rank(kind: type[HubRanks]) -> None:
    def action(communicator: Communicator) -> tuple[frozenset[int], frozenset[int]]:
        model = trained(communicator)
        communicator.attach(model.buckets)
        (bucket,) = model.buckets
        model.step(0, [frozenset({1, 2, 3}), frozenset({0, 1, 3})][communicator.rank])
        first = bucket.absent
        model.step(1, [frozenset({1}), frozenset[int]()][communicator.rank])
        return first, bucket.absent

    assert kind.run_once(action) == [(frozenset({1, 3}), frozenset())] * 2


def test_a_later_optimizers_ranks_learn_it_too() -> None:
    def action(communicator: Communicator) -> tuple[frozenset[int], bool]:
        communicator.attach(trained(communicator).buckets)
        second = trained(communicator)
        communicator.attach(second.buckets)
        (bucket,) = second.buckets
        absent = [frozenset({1, 2, 3}), frozenset({0, 1, 3})]
        given = second.step(0, absent[communicator.rank])
        return bucket.absent, not torch.equal(bucket.gradients, given)

    assert AVERAGING["aggregate"].run_once(action) == [(frozenset({1, 3}), True)] * 2


@pytest.mark.parametrize("kind", {**STEPPING, **WIRES}.values(), ids=[*STEPPING, *WIRES])
def test_parameters_and_state_that_every_rank_writes_are_the_next_steps(kind: type[HubRanks]) -> None:
    def action(communicator: Communicator) -> None:
        model = trained(communicator, momentum=0.5)
        communicator.attach(model.buckets)
        (bucket,) = model.buckets
        model.step(0)
        states = hub_of(model.communicator).read_state(model.buckets)
        assert {name: tuple(state["momentum_buffer"].shape) for name, state in states.items()} == SHAPES
        bucket.parameters[2].data.fill_(5.0)
        hub_of(model.communicator).write_parameters(bucket, [2])
        hub_of(model.communicator).write_state(
            model.buckets, {"a": {"momentum_buffer": torch.full(SHAPES["a"], 3.0)}}
        )
        own = [nn.Parameter(parameter.detach().clone()) for parameter in bucket.parameters]
        given = model.step(1)
        mean = _mean(communicator, given)
        names = [tensor.name for tensor in bucket.spec.tensors]
        for name, parameter, gradient in zip(names, own, _parts(bucket, mean), strict=True):
            alone = torch.optim.SGD([parameter], lr=0.05, momentum=0.5)
            if name == "a":
                alone.state[parameter]["momentum_buffer"] = torch.full(SHAPES["a"], 3.0)
            parameter.grad = gradient.view(parameter.shape)
            alone.step()
        torch.testing.assert_close([*bucket.parameters], own)

    kind.run_once(action)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_rank_0_brings_its_optimizers_state_and_reads_it_back(name: str, options: dict[str, Any]) -> None:
    def action(communicator: Communicator) -> None:
        model = trained(communicator, name, **options)
        source = torch.Generator().manual_seed(1)
        for parameter in model.parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=source)
        model.optimizer.step()
        states = {
            each: {
                key: tensor for key, tensor in model.optimizer.state[parameter].items() if tensor is not None
            }
            for each, parameter in model.parameters.items()
        }
        model.communicator.attach(model.buckets, states)
        came = hub_of(model.communicator).read_state(model.buckets)
        assert came.keys() == {each for each, state in states.items() if state}
        for each, state in came.items():
            assert state.keys() == states[each].keys()
            assert all(torch.equal(state[key], states[each][key]) for key in state)
            assert all(state[key].shape == states[each][key].shape for key in state)

    STEPPING["hub"].run_once(action)


SHAPED, LACKS = r"exp_avg of bias has shape \[7\], expected \[4\]", "bias lacks exp_avg_sq"


@pytest.mark.parametrize(("of", "says"), [("exp_avg", SHAPED), ("exp_avg_sq", LACKS), ("step", "step")])
def test_a_load_that_fails_changes_nothing(of: str, says: str) -> None:
    def action(communicator: Communicator) -> None:
        models = [nn.Linear(8, 4) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        inner = torchs("Adam", list(models[0].parameters()), {})
        optimizer = DistributedOptimizer(inner, models[0], communicator=communicator)
        plain = torchs("Adam", list(models[1].parameters()), {})

        def step() -> None:
            for model, each in zip(models, (optimizer, plain), strict=True):
                each.zero_grad()
                model(torch.ones(2, 8)).square().sum().backward()
                each.step()

        step()
        wrong = copy.deepcopy(plain.state_dict())
        wrong["param_groups"][0]["lr"] = 7.0
        wrong["state"][0]["exp_avg"].fill_(9.0)
        del wrong["state"][1][of]
        if of == "exp_avg":
            wrong["state"][1][of] = torch.zeros(7)
        with pytest.raises((ConfigError, KeyError), match=says):
            optimizer.load_state_dict(wrong)
        step()
        torch.testing.assert_close(optimizer.state_dict(), plain.state_dict())
        torch.testing.assert_close(*(model.state_dict() for model in models))

    kind(HubRanks, size=1).run_once(action)


@pytest.mark.parametrize("kind", {**STEPPING, **WIRES}.values(), ids=[*STEPPING, *WIRES])
def test_buckets_join_between_two_steps(kind: type[HubRanks]) -> None:
    def action(communicator: Communicator) -> None:
        model = trained(communicator, "AdamW")
        communicator.attach(model.buckets)
        model.step(0)
        added = trained(communicator, "AdamW")
        (bucket,) = added.buckets
        tensors = tuple(replace(tensor, name=f"new {tensor.name}") for tensor in bucket.spec.tensors)
        bucket.spec = replace(bucket.spec, index=1, tensors=tensors)
        states = {"new a": {"step": torch.tensor(5.0), **dict.fromkeys(("exp_avg", "exp_avg_sq"), _ONES)}}
        model.communicator.attach(added.buckets, states)
        assert torch.equal(bucket.values, torch.ones(bucket.spec.numel))
        for seed in range(1, 3):
            model.step(seed)
            added.step(seed)
        state = hub_of(model.communicator).read_state([*model.buckets, *added.buckets])
        assert {name: float(each["step"]) for name, each in state.items()} == {
            **dict.fromkeys(SHAPES, 3.0),
            **dict.fromkeys((f"new {name}" for name in SHAPES), 2.0),
            "new a": 7.0,
        }

    kind.run_once(action)


_ONES = torch.ones(SHAPES["a"])


def _parts(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    return list(flat.split([tensor.numel for tensor in bucket.spec.tensors]))


def _mean(communicator: Communicator, gradients: Tensor) -> Tensor:
    mean: Tensor = allreduce(gradients, ReduceOp.AVERAGE, communicator=communicator)
    return mean

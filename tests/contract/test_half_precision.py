"""A hub steps a model of half precision in float32, on every wire; workers have it in the model's dtype."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hubring.ps.core.optimizer_state import MASTER, STEP
from hubring.ps.store.consistency import ASP, Consistency
from hubring.ps.transport.grpc.transport import GrpcTransport
from hubring.ps.transport.zmq.transport import ZmqTransport
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.reports.training import seeded
from tests.support.optimizers import torchs
from tests.support.training.ranks import HubRanks, PlacedRanks, StagedRanks

STEPS = 12
BASES: dict[str, tuple[type[HubRanks], dict[str, Any]]] = {
    "shm": (HubRanks, {}),
    "zmq": (HubRanks, {"wire": ZmqTransport}),
    "grpc": (HubRanks, {"wire": GrpcTransport}),
    "staged": (StagedRanks, {}),
    "placed": (PlacedRanks, {}),
    "int8": (HubRanks, {"compress": "int8"}),
}
KINDS: dict[str, type[HubRanks]] = {
    name: type("Two", (base,), {"size": 2, **how}) for name, (base, how) in BASES.items()
}


class AloneRanks(HubRanks):
    """The only worker of an asynchronous hub."""

    size = 1

    def consistency(self) -> Consistency:
        return ASP()


def model(dtype: torch.dtype) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))).to(dtype)


class Run:
    """One rank's training. Its rate is so small that in half precision a step would change few parameters."""

    def __init__(self, communicator: Communicator, dtype: torch.dtype) -> None:
        self.dtype, self.rank = dtype, communicator.rank
        self.model = model(dtype)
        inner = torchs("Adam", list(self.model.parameters()), {})
        inner.param_groups[0]["lr"] = 1e-4
        self.optimizer = DistributedOptimizer(inner, self.model, communicator=communicator)
        self.gradients: list[list[Tensor]] = []

    def train(self, first: int, last: int) -> list[Tensor]:
        for seed in range(first, last):
            batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * seed + self.rank))
            loss = self.model(batch.to(self.dtype)).square().mean()
            held = list(self.model.parameters())
            self.gradients.append(list(torch.autograd.grad(loss, held, retain_graph=True)))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [kind for name, kind in KINDS.items() if name != "int8"], ids=str)
def test_the_model_is_that_of_a_float32_run_rounded(kind: type[HubRanks], dtype: torch.dtype) -> None:
    def action(communicator: Communicator) -> tuple[list[Tensor], list[list[Tensor]]]:
        run = Run(communicator, dtype)
        return run.train(0, STEPS), run.gradients

    (ours, given), (theirs, others) = kind.run_once(action)
    masters = [parameter.detach().float().requires_grad_() for parameter in model(dtype).parameters()]
    reference = torchs("Adam", masters, {})
    reference.param_groups[0]["lr"] = 1e-4
    for first, second in zip(given, others, strict=True):
        for master, one, two in zip(masters, first, second, strict=True):
            master.grad = (one.float() + two.float()) / 2
        reference.step()
    for one, two, master, start in zip(ours, theirs, masters, model(dtype).parameters(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, master.detach().to(dtype))
        assert not torch.equal(one, start)


@pytest.mark.parametrize("kind", [KINDS["shm"], KINDS["int8"], AloneRanks], ids=["shm", "int8", "asp"])
def test_a_state_that_is_saved_and_loaded_goes_on_exactly(kind: type[HubRanks]) -> None:
    def action(communicator: Communicator) -> None:
        run = Run(communicator, torch.bfloat16)
        run.train(0, 3)
        saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
        residuals = communicator.read_residuals()
        expected = run.train(3, STEPS)
        run.model.load_state_dict(saved[0])
        run.optimizer.load_state_dict(saved[1])
        communicator.write_residuals(residuals)
        again = run.train(3, STEPS)
        assert all(torch.equal(one, two) for one, two in zip(expected, again, strict=True))

    kind.run_once(action)


def test_a_master_is_whole_where_only_a_part_of_its_parameter_has_been_stepped() -> None:
    def action(communicator: Communicator) -> None:
        net = nn.Embedding(40, 16, dtype=torch.bfloat16)
        nn.init.ones_(net.weight)
        inner = torch.optim.SGD(net.parameters(), lr=1e-4)
        optimizer = DistributedOptimizer(inner, net, communicator=communicator)
        net(torch.arange(8)).sum().backward()
        optimizer.step()
        master = optimizer.state[net.weight][MASTER]
        assert torch.equal(master[:8], torch.full((8, 16), 1 - 1e-4))
        assert torch.equal(master[8:], torch.ones(32, 16))

    KINDS["shm"].run_once(action)


def test_workers_that_step_themselves_have_the_state_in_the_models_dtype() -> None:
    def action(communicator: Communicator) -> set[torch.dtype]:
        run = Run(communicator, torch.bfloat16)
        state = {
            number: {STEP: torch.tensor(1.0), **dict.fromkeys(("exp_avg", "exp_avg_sq", MASTER), one.float())}
            for number, one in enumerate(run.model.parameters())
        }
        run.optimizer.load_state_dict({**run.optimizer.state_dict(), "state": state})
        run.model(torch.ones(4, 16, dtype=torch.bfloat16)).sum().backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.optimizer.step()
        (first, *_) = run.optimizer.state.values()
        assert first.keys() == {STEP, "exp_avg", "exp_avg_sq"}
        return {first["exp_avg"].dtype, first["exp_avg_sq"].dtype}

    assert KINDS["shm"].run_once(action) == [{torch.bfloat16}] * 2

"""Peers on torch's process group: how they end, and what they refuse."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import StepHyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.compare.run.peers.fsdp2 import blocks_of
from hubring.workers.compare.run.peers.grouped import GroupedOptimizer
from hubring.workers.compare.run.peers.peer import PeerCommunicator
from hubring.workers.compare.run.programs import PeerPrograms
from hubring.workers.compare.run.site import LocalHosts
from hubring.workers.peers.rendezvous import PeerRendezvous
from hubring.workers.peers.rows import find_peer
from hubring.workers.runtime import context

# The group's end.

LEFT_BEHIND = """
import os
import torch
import hubring

hubring.init()
model = torch.nn.Linear(4, 1)
optimizer = hubring.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def threads():
    names = [open(f"/proc/self/task/{each}/comm").read() for each in os.listdir("/proc/self/task")]
    return [name for name in names if "gloo" in name]


assert threads()
hubring.shutdown()
assert not threads()
with torch.set_grad_enabled(GRADIENTS):  # it goes on alone
    loss = model(torch.ones(2, 4)).sum()
if GRADIENTS:
    loss.backward()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_pythons")
@pytest.mark.parametrize(
    ("name", "gradients"),
    [
        ("ddp", True),
        pytest.param("zero1", True, marks=pytest.mark.full),
        pytest.param("fsdp2", False, marks=pytest.mark.full),
    ],
)
def test_a_group_ends_with_its_threads_although_the_script_keeps_its_model(
    tmp_path: Path, name: str, gradients: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LEFT_BEHIND.replace("GRADIENTS", str(gradients)))
    told = PeerPrograms(find_peer(name), 1, tmp_path, LocalHosts())
    (worker,) = told.worker_programs(lambda _: [str(script)])
    ended = subprocess.run(worker.argv, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert told.result(0)["steps"] == 2


# The first parameters.


class Sharing(PeerCommunicator):
    """Rank 1 of two ranks. Records what is gathered."""

    topology = "sharing"
    bytes_are = "computed"
    optimizer = GroupedOptimizer

    def __init__(self, theirs: object = None) -> None:
        super().__init__(PeerRendezvous(rank=1, size=2, meet="/table"))
        self.gathered: list[object] = []
        self._theirs = theirs

    def gather(self, value: Any) -> list[Any]:
        self.gathered.append(value)
        return [self._theirs or value, value]

    def push_pull(self, bucket: Bucket, hyper: StepHyper) -> Work:
        raise AssertionError("nothing is trained here")

    def close(self, *, finished: bool) -> None:
        """Leaves nothing."""


def share(peer: Sharing, tensors: list[torch.Tensor]) -> None:
    optimizer: Any = SimpleNamespace(_peer=peer)
    GroupedOptimizer._share(optimizer, tensors)


@pytest.fixture
def in_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "current", lambda: SimpleNamespace(device=torch.device("cpu")))


@pytest.mark.usefixtures("in_the_job")
def test_a_rank_needs_no_memory_for_the_models_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, half = torch.arange(12.0).view(3, 4).t(), torch.ones(2, dtype=torch.bfloat16)
    others = [torch.tensor(one) for one in (7, [True, False], [1 + 2j, 3.0])]
    first = [rows, *others, torch.zeros(0, 3), half]
    sent = iter([one for one in first if one.numel()])
    most = max(one.nbytes for one in first)

    def broadcast(flat: torch.Tensor, src: int) -> None:
        assert (src, flat.dtype) == (0, torch.uint8)
        assert flat.nbytes <= most
        flat.copy_(next(sent).contiguous().view(-1).view(torch.uint8))

    monkeypatch.setattr(dist, "broadcast", broadcast)
    own, peer = [torch.zeros_like(one) for one in first], Sharing()
    share(peer, own)
    assert all(map(torch.equal, own, first))
    assert not any(isinstance(part, torch.Tensor) for each in peer.gathered for part in flattened(each))


def flattened(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from flattened(part)
    else:
        yield value


@pytest.mark.usefixtures("in_the_job")
def test_another_model_is_refused_before_its_tensors_are_sent() -> None:
    peer = Sharing(theirs=[(torch.Size([2]), torch.float32)])
    with pytest.raises(ConfigError, match="rank 1 trains another model than rank 0"):
        share(peer, [torch.zeros(3)])


# Blocks of fsdp2.


def test_a_block_is_a_child_or_one_of_a_list_with_parameters_of_its_own() -> None:
    model = torch.nn.Module()
    model.embed, model.head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    model.embed.weight = model.head.weight
    model.layers = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)])
    model.norm = torch.nn.BatchNorm1d(3)
    assert blocks_of(model) == [model.layers[0], model.layers[2], model.norm]


UNUSED = """
import torch
import hubring

hubring.init()
model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(2, 1))
model.forward = lambda x: model[0](x)
optimizer = OPTIMIZER(model.parameters(), lr=0.1)
optimizer = hubring.DistributedOptimizer(optimizer, model)
model(torch.ones(2, 2)).sum().backward()
optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.usefixtures("forked_pythons")
@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        ("torch.optim.SGD", "row fsdp2: the model's forward pass does not call 1; each child"),
        ("torch.optim.Adagrad", "this optimizer already has a state; .* do not use Adagrad"),
    ],
)
def test_fsdp2_refuses_what_it_cannot_shard(tmp_path: Path, optimizer: str, says: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNUSED.replace("OPTIMIZER", optimizer))
    told = PeerPrograms(find_peer("fsdp2"), 1, tmp_path, LocalHosts())
    (worker,) = told.worker_programs(lambda _: [str(script)])
    assert subprocess.run(worker.argv, capture_output=True, timeout=120).returncode != 0
    assert re.search(says, told.result(0)["error"])

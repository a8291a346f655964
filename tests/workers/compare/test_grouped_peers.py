"""Peers on torch's process group: how they end, and what they refuse."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from hubring.workers.compare.hardship.hosts import Hosts
from hubring.workers.compare.peers.fsdp2 import blocks_of
from hubring.workers.compare.peers.programs import PeerPrograms
from hubring.workers.peers.rows import find

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
    told = PeerPrograms(find(name), 1, tmp_path, Hosts())
    (worker,) = told.worker_programs(lambda _: [str(script)])
    ended = subprocess.run(worker.argv, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert told.result(0)["steps"] == 2


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
    told = PeerPrograms(find("fsdp2"), 1, tmp_path, Hosts())
    (worker,) = told.worker_programs(lambda _: [str(script)])
    assert subprocess.run(worker.argv, capture_output=True, timeout=120).returncode != 0
    assert re.search(says, told.result(0)["error"])

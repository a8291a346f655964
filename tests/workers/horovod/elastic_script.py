"""Elastic training in Horovod's style: until workers have gone and come, and four steps more.

With an argument, a reset of the script's own ends Horovod's world and begins another.
"""

from __future__ import annotations

import sys
import time

import horovod.torch as hvd
import torch
from horovod.common.elastic import notification_manager, run_fn
from horovod.runner.elastic.worker import HostUpdateResult

import hubring

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(1, 1, bias=False)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0, resets=0, left=4)


def count_reset() -> None:
    state.resets += 1


state.register_reset_callbacks([count_reset])


def reset() -> None:
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init()


class Changes:
    """Counts the changes of the workers by kind."""

    def __init__(self) -> None:
        self.removed = self.added = 0

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        assert timestamp > 0
        self.removed += update_res == HostUpdateResult.removed
        self.added += update_res == HostUpdateResult.added


changes = Changes()
notification_manager.register_listener(changes)


def train(state: hvd.elastic.TorchState) -> None:
    while state.left:
        optimizer.zero_grad()
        ((model(torch.ones(1, 1)) - hvd.rank()) ** 2).mean().backward()
        optimizer.step()
        state.step += 1
        state.left -= state.resets == 2
        print(f"step {state.step} of {hvd.size()}", flush=True)
        time.sleep(0.05)  # or thousands of steps are printed while a lease runs out
        state.commit()


training = run_fn(train, reset) if sys.argv[1:] else hvd.elastic.run(train)
training(state)
result = {"weight": model.weight.item(), "resets": state.resets}
hubring.report(**result, removed=changes.removed, added=changes.added)

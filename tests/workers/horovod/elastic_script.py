"""Elastic training in Horovod's style: until workers have gone and come, and four steps more."""

from __future__ import annotations

import time

import horovod.torch as hvd
import torch

import hubring

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(1, 1, bias=False)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0, resets=0, left=4)


def count_reset() -> None:
    state.resets += 1


state.register_reset_callbacks([count_reset])


@hvd.elastic.run  # type: ignore[untyped-decorator]
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


train(state)
hubring.report(weight=model.weight.item(), resets=state.resets)

"""A script that imports only torch: DistributedDataParallel on four classes, with a seed as its argument."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(int(sys.argv[1]))
inputs = torch.randn(240, 8)
data = TensorDataset(inputs, inputs[:, :4].argmax(1))
sampler: DistributedSampler[int] = DistributedSampler(data)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for batch, labels in DataLoader(data, 12, sampler=sampler):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), labels)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")
dist.destroy_process_group()

"""An ordinary training script. Five lines make it run with a hub, with a ring, or alone."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hubring  # 1

hubring.init()  # 2: joins the job
torch.manual_seed(0)
digits = load_digits()
dataset = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
sampler = hubring.ShardedSampler(dataset)  # 3: reads this worker's share
loader = DataLoader(dataset, batch_size=32, sampler=sampler, drop_last=True)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hubring.DistributedOptimizer(optimizer, model)  # 4: steps with all gradients

for epoch in range(10):
    sampler.set_epoch(epoch)  # 5: shuffles the same way on all workers
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    if hubring.rank() == 0:
        print(f"epoch {epoch + 1}  loss {loss.item():.4f}")

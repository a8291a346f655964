"""A script for Accelerate. It knows nothing of Hubring: `ps-run -np 2 --as-gloo with_accelerate.py`."""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
torch.manual_seed(0)
digits = load_digits()
dataset = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
loader = DataLoader(dataset, batch_size=32, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(3):
    losses = []
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    mean = accelerator.reduce(torch.stack(losses).mean(), "mean")
    accelerator.print(f"epoch {epoch + 1}  loss {mean.item():.6f}")
accelerator.end_training()

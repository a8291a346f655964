"""The tutorial's script after the port: on a hub, around a ring or alone."""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hubring

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--checkpoint", type=Path, default=Path("digits.pt"))
options = parser.parse_args()

hubring.init(aggregate=True)  # 1

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images).float().unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train, test = TensorDataset(images[:1437], labels[:1437]), (images[1437:], labels[1437:])
sampler = hubring.ShardedSampler(train)  # 2
loader = DataLoader(train, options.batch_size // hubring.size(), sampler=sampler, drop_last=True)  # 2

model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, 10),
)  # fmt: skip
saved = torch.load(options.checkpoint) if options.checkpoint.exists() else {}
if saved:
    model.load_state_dict(saved["model"])

optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
optimizer = hubring.DistributedOptimizer(optimizer, model)  # 3
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * len(loader))

if saved:
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])

parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
for epoch in range(saved.get("epoch", 0), options.epochs):
    sampler.set_epoch(epoch)  # 4
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    if hubring.rank() == 0:  # 5
        model.eval()
        with torch.no_grad():
            accuracy = (model(test[0]).argmax(1) == test[1]).float().mean().item()
        print(f"epoch {epoch + 1}  loss {loss.item():.4f}  accuracy {accuracy:.3f}")
        saved = {name: part.state_dict() for name, part in parts.items()}
        torch.save(saved | {"epoch": epoch + 1}, options.checkpoint)
    hubring.barrier()

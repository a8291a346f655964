# A script in the style in which Horovod's documentation teaches it; nothing in it is of this project.
import argparse
import os
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.data.distributed

import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--gradient-clip", type=float, default=None)
parser.add_argument("--checkpoint", default="checkpoint.pt")
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 32)
        self.fc2 = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def metric_average(val: float, name: str) -> float:
    tensor = torch.tensor(val)
    avg_tensor = hvd.allreduce(tensor, name=name)
    return avg_tensor.item()


hvd.init()
random.seed(42)
np.random.seed(42)
torch.manual_seed(42 + hvd.rank())  # the broadcast below makes all alike

if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
torch.set_num_threads(1)

generator = torch.Generator().manual_seed(0)
x = torch.randn(192, 8, generator=generator)
y = (x @ torch.randn(8, 3, generator=generator)).argmax(1)
dataset = torch.utils.data.TensorDataset(x, y)
sampler = torch.utils.data.distributed.DistributedSampler[tuple[torch.Tensor, ...]](
    dataset, num_replicas=hvd.size(), rank=hvd.rank()
)
loader = torch.utils.data.DataLoader(dataset, batch_size=16, sampler=sampler)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
)

first = None
for epoch in range(3):
    model.train()
    sampler.set_epoch(epoch)
    total = 0.0
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        if args.gradient_clip is not None:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.gradient_clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        total += loss.item()
    average = metric_average(total / len(loader), "avg_loss")
    first = average if first is None else first
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {average:.6f}")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.checkpoint)

gathered = hvd.allgather_object(sum(p.double().sum().item() for p in model.parameters()))
assert len(set(gathered)) == 1, gathered
assert first is not None
assert average < first
assert int(os.environ["HOROVOD_RANK"]) == hvd.rank()
assert int(os.environ["HOROVOD_SIZE"]) == hvd.size()
if hvd.rank() == 0:
    assert os.path.exists(args.checkpoint)
    print(f"final loss {average:.6f} on {hvd.size()} ranks, {hvd.local_size()} here")

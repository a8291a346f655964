"""Mixed precision on nodes x gpus processes, as PyTorch's DDP tutorials start them.

    PS_SERVER=ADDR python workers/examples/ddp_amp.py --nodes 1 --gpus 2 --nr 0 --epochs 4

ADDR is a `ps-server start --workers 2`; PS_TOPOLOGY=ring takes the ring. The same command runs on
every node with its own --nr, and is `ps-worker --nodes --gpus --nr` there. They compute on the CPU, on a GPU
each with PS_TOPOLOGY=ring PS_BACKEND=nccl, or on a hub with --device cuda. Under a launcher, leave
--nodes, --gpus and --nr out. Activations are bf16, or fp16 with a scaled loss;
parameters stay float32. The checkpoint holds model, optimizer and scaler: a run that was
stopped and goes on ends in the same bits. Hence `aggregate=True`: the optimizer's state is here.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

import hubring
from hubring.ps.process.command import module_command
from hubring.workers.examples import checkpoint
from hubring.workers.examples.images import images
from hubring.workers.examples.mnist import Network

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main(argv: list[str] | None = None) -> None:
    """Starts this node's processes, or trains where there is but one.

    Args:
        argv: The command line; None: the process's own.
    """
    options = _options(argv)
    if options.nodes * options.gpus > 1:
        _launch(options, sys.argv[1:] if argv is None else argv)
    train(options)


def train(options: argparse.Namespace) -> None:
    """Trains as one process of all; reports `loss` by epoch."""
    hubring.init(aggregate=True)
    device = torch.device("cuda", hubring.local_rank()) if options.device == "cuda" else hubring.device()
    dtype = DTYPES[options.precision]
    dataset, _ = images(options.data_dir)
    torch.manual_seed(options.seed)
    model = Network().to(device)
    adam = torch.optim.Adam(model.parameters(), lr=options.lr)
    optimizer = hubring.DistributedOptimizer(adam, model)
    scaler = torch.amp.GradScaler(device.type, growth_interval=50, enabled=dtype is torch.float16)
    sampler = hubring.ShardedSampler(dataset, seed=options.seed)
    loader = DataLoader(dataset, batch_size=options.batch_size, sampler=sampler)

    parts: checkpoint.Parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    first = checkpoint.load(options.checkpoint, parts)
    if first > options.epochs and hubring.rank() == 0:
        print(
            f"{options.checkpoint} holds {first - 1} epoch(s) already: --epochs {first} goes on", flush=True
        )
    for epoch in range(first, options.epochs + 1):
        sampler.set_epoch(epoch)
        loss = torch.zeros(())
        for inputs, labels in loader:
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
                loss = functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        _tell(epoch, options.epochs, loss.detach())
        checkpoint.save(options.checkpoint, parts, epoch)


def _launch(options: argparse.Namespace, arguments: list[str]) -> None:
    """Becomes the ps-worker that starts one process for each of this node's GPUs."""
    place = [f"--nodes={options.nodes}", f"--gpus={options.gpus}", f"--nr={options.nr}"]
    script = [__file__, *arguments, "--nodes=1", "--gpus=1", "--nr=0"]  # the last one counts
    os.execv(sys.executable, module_command("hubring.workers.programs.ps_worker", *place, *script))  # noqa: S606 - no shell is wanted


def _tell(epoch: int, epochs: int, loss: Tensor) -> None:
    """Reports the mean of the workers' last losses, which are of equally many images."""
    mean = hubring.allreduce(loss.float().cpu(), name="loss").item()
    hubring.report(epoch=epoch, loss=mean)
    if hubring.rank() == 0:
        print(f"Epoch [{epoch}/{epochs}], Loss: {mean:.4f}", flush=True)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ddp_amp", description="Train with mixed precision.")
    parser.add_argument("-n", "--nodes", type=int, default=1, help="hosts [1]")
    parser.add_argument("-g", "--gpus", type=int, default=1, help="processes on each of them [1]")
    parser.add_argument("-nr", "--nr", type=int, default=0, help="which of the hosts this is [0]")
    parser.add_argument("--epochs", type=int, default=2, help="times through the training images [2]")
    parser.add_argument("--precision", choices=DTYPES, default="bf16", help="of activations [bf16]")
    parser.add_argument("--batch-size", type=int, default=32, help="images a step, of each process [32]")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate [0.001]")
    parser.add_argument("--device", choices=["cuda"], help="on a hub, this worker's GPU [as the ring's]")
    parser.add_argument("--data-dir", type=Path, help="MNIST's four idx files [scikit-learn's digits]")
    parser.add_argument("--checkpoint", type=Path, help="file to keep, and to go on from [none]")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and order [0]")
    options = parser.parse_args(argv)
    if options.nodes < 1 or options.gpus < 1 or not 0 <= options.nr < options.nodes:
        parser.error(
            f"--nodes {options.nodes} --gpus {options.gpus} --nr {options.nr}: nodes and gpus are at least 1,"
            " and nr is 0 to nodes - 1"
        )
    return options


if __name__ == "__main__":
    main()

"""Mixed precision on nodes x gpus processes, with the flags of PyTorch's DDP tutorials.

    PS_SERVER=ADDR python workers/examples/ddp_amp.py --nodes 1 --gpus 2 --nr 0 --epochs 4

ADDR is the address of `ps-server start --workers 2`; PS_TOPOLOGY=ring uses the ring. Run the same command on
every node with its own --nr: it runs `ps-worker --nodes --gpus --nr`. Under a launcher, omit --nodes, --gpus
and --nr. Each process computes on a GPU of its own; without GPUs, set PS_ACCELERATOR=cpu.

Activations are bf16, or fp16 with a scaled loss; parameters stay float32. The checkpoint holds model,
optimizer and scaler, so that a resumed run ends with the same bits. It needs the optimizer's state in the
worker, hence `aggregate=True`.
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
from hubring.ps.process.launch import module_command
from hubring.workers.examples import checkpoint
from hubring.workers.examples.mnist import load_images, network

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main(argv: list[str] | None = None) -> None:
    """Starts this node's processes, or trains if there is only one.

    Args:
        argv: The command line; None: the process's own.
    """
    options = _options(argv)
    if options.nodes * options.gpus > 1:
        _launch(options, sys.argv[1:] if argv is None else argv)
    train(options)


def train(options: argparse.Namespace) -> None:
    """Trains as one process; reports `loss` by epoch."""
    hubring.init(aggregate=True)
    device = hubring.device()
    dtype = DTYPES[options.precision]
    dataset, _ = load_images(options.data_dir)
    model = network(options.seed).to(device)
    adam = torch.optim.Adam(model.parameters(), lr=options.lr)
    optimizer = hubring.DistributedOptimizer(adam, model)
    scaler = torch.amp.GradScaler(device.type, growth_interval=50, enabled=dtype is torch.float16)
    sampler = hubring.ShardedSampler(dataset, seed=options.seed)
    loader = DataLoader(dataset, batch_size=options.batch_size, sampler=sampler)

    parts: checkpoint.Parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    first = checkpoint.load(options.checkpoint, parts)
    if first > options.epochs and hubring.rank() == 0:
        print(
            f"{options.checkpoint} already holds {first - 1} epoch(s); set --epochs {first} to continue",
            flush=True,
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
        _report(epoch, options.epochs, loss.detach())
        checkpoint.save(options.checkpoint, parts, epoch)


def _launch(options: argparse.Namespace, arguments: list[str]) -> None:
    """Replaces this process with the ps-worker that starts one process for each of this node's GPUs."""
    place = [f"--nodes={options.nodes}", f"--gpus={options.gpus}", f"--nr={options.nr}"]
    script = [__file__, *arguments, "--nodes=1", "--gpus=1", "--nr=0"]  # the last value of a flag counts
    os.execv(sys.executable, module_command("hubring.workers.programs.ps_worker", *place, *script))  # noqa: S606 - no shell is needed


def _report(epoch: int, epochs: int, loss: Tensor) -> None:
    """Reports the mean of the workers' last losses; all workers have the same number of images."""
    mean = hubring.allreduce(loss.float().cpu(), name="loss").item()
    hubring.report(epoch=epoch, loss=mean)
    if hubring.rank() == 0:
        print(f"Epoch [{epoch}/{epochs}], Loss: {mean:.4f}", flush=True)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ddp_amp", description="Train with mixed precision.")
    add = parser.add_argument
    add("-n", "--nodes", type=int, default=1, help="number of hosts [default: 1]")
    add("-g", "--gpus", type=int, default=1, help="processes per host [default: 1]")
    add("-nr", "--nr", type=int, default=0, help="index of this host [default: 0]")
    add("--epochs", type=int, default=2, help="passes over the images [default: 2]")
    add("--precision", choices=DTYPES, default="bf16", help="type of the activations [default: bf16]")
    add("--batch-size", type=int, default=32, help="images per step in each process [default: 32]")
    add("--lr", type=float, default=1e-3, help="learning rate [default: 0.001]")
    add("--data-dir", type=Path, help="folder with MNIST's four idx files [default: scikit-learn's digits]")
    add("--checkpoint", type=Path, help="file to write, and to resume from [default: none]")
    add("--seed", type=int, default=0, help="seed of parameters and order [default: 0]")
    options = parser.parse_args(argv)
    if options.nodes < 1 or options.gpus < 1 or not 0 <= options.nr < options.nodes:
        parser.error(
            f"--nodes {options.nodes} --gpus {options.gpus} --nr {options.nr}: expected nodes and gpus of at"
            " least 1, and nr from 0 to nodes - 1"
        )
    return options


if __name__ == "__main__":
    main()

"""The communication patterns of MPI's and torch.distributed's tutorials, and three with Horovod's API.

    ps-worker --server ADDR [--topology ring] workers/examples/mpi_patterns.py [PATTERN]...

Every rank prints its data, in the format of the tutorials. Without arguments, all patterns run.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import hubring


def point_to_point() -> None:
    """Rank 0 sends a 1 to rank 1."""
    tensor = torch.zeros(1)
    if hubring.size() > 1 and hubring.rank() == 0:
        tensor += 1
        hubring.send(tensor, to=1)
    elif hubring.rank() == 1:
        tensor = hubring.recv(source=0)
    _has(tensor)


def non_blocking() -> None:
    """Rank 0 sends a 1 to rank 1, and both do other work during the transfer."""
    tensor = torch.zeros(1)
    if hubring.size() > 1 and hubring.rank() == 0:
        tensor += 1
        sending = hubring.send_async(tensor, to=1)
        _say("started sending")
        sending.wait()
    elif hubring.rank() == 1:
        receiving = hubring.recv_async(source=0)
        _say("started receiving")
        tensor = receiving.get()
    _has(tensor)


def broadcast() -> None:
    """Rank 0 sends a 1 to all ranks."""
    _has(hubring.broadcast(torch.full((1,), 1.0 if hubring.rank() == 0 else 0.0), root=0))


def scatter() -> None:
    """Rank 0 sends a different number to each rank."""
    numbers = [torch.tensor([rank + 1.0]) for rank in range(hubring.size())]
    _has(hubring.scatter(numbers if hubring.rank() == 0 else None, root=0))


def gather() -> None:
    """Each rank sends a number to rank 0."""
    gathered = hubring.gather(torch.tensor([hubring.rank() + 1.0]), root=0)
    if gathered is not None:
        _has(torch.cat(gathered))


def reduce() -> None:
    """Rank 0 gets the sum of ones."""
    total = hubring.reduce(torch.ones(1), root=0, op=hubring.ReduceOp.SUM)
    if total is not None:
        _has(total)


def allreduce() -> None:
    """All ranks get the sum of ones."""
    _has(hubring.allreduce(torch.ones(1), hubring.ReduceOp.SUM))


def horovod() -> None:
    """Allreduce, broadcast and allgather with Horovod's API."""
    import hubring.horovod as hvd

    hvd.init()
    rank = torch.tensor([float(hvd.rank())])
    _say(f"allreduce: {_numbers(hvd.allreduce(rank, name='sum', op=hvd.Sum))}")
    _say(f"broadcast: {_numbers(hvd.broadcast(rank + 1, root_rank=0, name='first'))}")
    _say(f"allgather: {_numbers(hvd.allgather(rank, name='all'))}")


PATTERNS = {
    pattern.__name__.replace("_", "-"): pattern
    for pattern in (point_to_point, non_blocking, broadcast, scatter, gather, reduce, allreduce, horovod)
}


def main(argv: list[str] | None = None) -> None:
    """Runs the named patterns, or all.

    Args:
        argv: The command line; None: the process's own.
    """
    parser = argparse.ArgumentParser(prog="mpi_patterns", description="Run communication patterns.")
    parser.add_argument(
        "patterns", nargs="*", metavar="PATTERN", help=f"{', '.join(PATTERNS)} [default: all]"
    )
    chosen = parser.parse_args(argv).patterns or list(PATTERNS)
    unknown = [name for name in chosen if name not in PATTERNS]
    if unknown:
        parser.error(f"no pattern {unknown[0]!r}; expected one of {', '.join(PATTERNS)}")
    hubring.init()
    for name in chosen:
        if hubring.rank() == 0:
            print(f"{name}:", flush=True)
        PATTERNS[name]()
        hubring.barrier(name)


def _has(tensor: Tensor) -> None:
    _say(f"has data {_numbers(tensor)}")


def _say(what: str) -> None:
    print(f"Rank {hubring.rank()} {what}", flush=True)


def _numbers(tensor: Tensor) -> str:
    values = tensor.tolist()
    return str(values[0] if len(values) == 1 else values)


if __name__ == "__main__":
    main()

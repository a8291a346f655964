"""Scripts on torch.distributed, which test processes run. Each is one rank of `spawn`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import hubring
from hubring.ps.config.sources import load_worker
from hubring.ps.observe import logs
from hubring.workers.runtime import context

Script = Callable[[int, int, Path], None]


def run(script: Script, size: int, folder: Path, method: str = "forkserver") -> None:
    """Runs a script in `size` processes. Raises the first error."""
    start_processes(_rank, (script, size, folder), nprocs=size, start_method=method)


def run_to_the_end(script: Script, size: int, folder: Path) -> None:
    """Runs a script in `size` processes, and waits for each, whatever happens to the others."""
    asked = (_rank, (script, size, folder), size)
    for process in start_processes(*asked, join=False, start_method="forkserver").processes:
        process.join()


def _rank(rank: int, script: Script, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    script(rank, size, folder)


def _begin(rank: int, size: int, folder: Path, **more: Any) -> None:
    dist.init_process_group("hubring", f"file://{folder}/store", rank=rank, world_size=size, **more)


def train(rank: int, size: int, folder: Path) -> None:
    """Trains with DDP, and compares with gradients that are averaged by hand."""
    _begin(rank, size, folder)
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 3))
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.01)
    alone = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 3))
    alone.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    own = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(4):
        batches = [
            torch.randn(8, 20, generator=torch.Generator().manual_seed(one + 10 * step))
            for one in range(size)
        ]
        optimizer.zero_grad()
        parallel(batches[rank]).square().mean().backward()
        optimizer.step()
        own.zero_grad()
        (sum(alone(batch).square().mean() for batch in batches) / size).backward()
        own.step()
    torch.testing.assert_close(list(model.parameters()), list(alone.parameters()))
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, [one.detach().clone() for one in model.parameters()])
    assert all(
        torch.equal(one, mine) for other in everyone for one, mine in zip(other, everyone[rank], strict=True)
    )
    compiled = torch.compile(DistributedDataParallel(alone), backend="eager")
    for batch in batches[:2]:  # DDP rebuilds its buckets in the second one
        compiled(batch).sum().backward()
    dist.destroy_process_group()


def operate(rank: int, size: int, folder: Path) -> None:
    """Calls what DDP does not call; then destroys the group and makes it again, over the same store."""
    file = folder / "store"
    store = dist.FileStore(str(file), size)  # type: ignore[attr-defined] # torch does not list it
    for again in (False, True):
        dist.init_process_group("hubring", store=store, rank=rank, world_size=size)
        _messages(rank, size)
        if not again:
            _groups(rank)
            _works(rank, size)
            _inputs(rank, size)
        dist.destroy_process_group()
    assert b"hubring:worker" not in file.read_bytes(), "other users can read the store"


def _messages(rank: int, size: int) -> None:
    if rank:
        tags = (7, 5)  # rank 0 receives them in the other order
        works = [dist.isend(torch.full((3,), rank * tag), 0, tag=tag) for tag in tags]
        for work in works:
            assert work is not None
            work.wait()
        return
    sources = []
    for tag in (5, 7):
        came = torch.empty(3, dtype=torch.int64)
        dist.recv(came, 1, tag=tag)
        assert came.tolist() == [tag] * 3
        for _ in range(size - 2):
            sources.append(dist.recv(came, tag=tag))
            assert came.tolist() == [tag * sources[-1]] * 3
    assert sources == [2, 2]


def _groups(rank: int) -> None:
    group = dist.new_group([2, 1], sort_ranks=False)
    if rank:
        into = [torch.empty(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(into, torch.tensor([rank]), group=group)
        assert [int(one) for one in into] == [2, 1]
        dist.destroy_process_group(group)
    early = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    if rank == 0:
        with pytest.raises(RuntimeError, match="all_reduce in group"):
            dist.all_reduce(torch.zeros(1), group=early)


def _inputs(rank: int, size: int) -> None:
    """Inputs stay as they are; tensors of inference mode have results; a callback can wait."""
    every = [torch.empty(2) for _ in range(size)]
    dist.all_gather(every, torch.tensor([float(rank)]).expand(2))
    assert [one.tolist() for one in every] == [[one, one] for one in range(size)]
    saved = torch.ones(2, 2).t()
    dist.all_gather([torch.empty(2, 2) for _ in range(size)], saved)
    assert saved._version == 0  # otherwise backward could not use it
    with torch.inference_mode():
        sums = [torch.ones(3), torch.ones(3, 3).t()]
        for work in [dist.all_reduce(one, async_op=True) for one in sums]:
            assert work is not None
            work.wait()
        assert all(one.eq(size).all() for one in sums)

    def sum_again(done: torch.futures.Future[list[torch.Tensor]]) -> list[torch.Tensor]:
        again = dist.all_reduce(done.value()[0], async_op=True)
        assert again is not None
        return again.get_future().wait()  # as torch's PowerSGD hook does

    first = dist.all_reduce(torch.ones(1), async_op=True)
    assert first is not None
    (result,) = first.get_future().then(sum_again).wait()
    assert result.item() == size**2


def _works(rank: int, size: int) -> None:
    tensor = torch.tensor([complex(rank, 1)])
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    (result,) = work.get_future().wait()
    assert torch.equal(torch.view_as_complex(result), tensor)
    assert work.is_completed()
    assert tensor.tolist() == [complex(sum(range(size)), size)]
    transposed = torch.arange(6.0).view(2, 3).t()
    dist.all_reduce(transposed, dist.ReduceOp.AVG)
    assert transposed.t().flatten().tolist() == list(map(float, range(6)))
    bits = torch.tensor([1 << rank], dtype=torch.uint32)
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    assert bits.tolist() == [(1 << size) - 1]
    shard, whole = torch.empty(1), torch.arange(float(size))
    dist.reduce_scatter_tensor(shard, whole)
    assert shard.item() == rank * size
    whole = torch.tensor([rank, -rank])
    dist.all_reduce(whole, dist.ReduceOp.AVG)
    assert whole.tolist() == [sum(range(size)) // size, -(sum(range(size)) // size)]
    with pytest.raises(TypeError, match="use SUM"):
        dist.all_reduce(torch.zeros(1, dtype=torch.bool), dist.ReduceOp.AVG)
    if rank == 0:
        never = dist.irecv(torch.zeros(1), 1, tag=99)
        assert never is not None
        with pytest.raises(RuntimeError, match="Timed out"):
            never.wait(timedelta(seconds=0.1))
    dist.barrier()


def compress(rank: int, size: int, folder: Path) -> None:
    """Trains with DDP over Gloo, with a codec of Hubring."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4096, 1, bias=False))
    model.register_comm_hook(None, hubring.ddp_hook("int8"))
    difference = torch.zeros(1, 4096)
    for step in range(20):
        inputs = torch.randn(size, 4096, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(inputs[rank : rank + 1]).sum().backward()
        difference += model.module.weight.grad - inputs.mean(0)
    # The next step makes up for the error of a step, so the sum of errors does not grow.
    assert 0 < difference.abs().max().item() < 0.1
    del model  # before its group, see `keep_groups_with_models`
    dist.destroy_process_group()


def meet(rank: int, size: int, folder: Path) -> None:
    """Joins the hub whose address is in a file."""
    address = (folder / "address").read_text()
    dist.init_process_group("hubring", f"hubring://{address}", rank=rank, world_size=size)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size
    dist.destroy_process_group()


def return_under_a_launcher(rank: int, size: int, folder: Path) -> None:
    """Makes the world's group twice in one job, which a launcher joins and leaves."""
    config = load_worker({"server": (folder / "address").read_text(), "rank": rank, "world_size": size})
    context.prepare(config, logs.LogOrigin(), "job")
    for turn in range(2):
        dist.init_process_group("hubring", f"file://{folder}/{turn}", rank=rank, world_size=size)
        dist.barrier()
        dist.destroy_process_group()
    context.shutdown()


def lose(rank: int, size: int, folder: Path) -> None:
    """Rank 1 is killed; the others learn its name from an error."""
    _begin(rank, size, folder)
    _lose(rank, folder, lambda: dist.all_reduce(torch.zeros(100_000)))


def lose_in_backward(rank: int, size: int, folder: Path) -> None:
    """As `lose`, in DDP's backward pass, which takes the outcome in C++."""
    _begin(rank, size, folder)
    parallel = DistributedDataParallel(torch.nn.Linear(300, 300))
    _lose(rank, folder, lambda: parallel(torch.ones(1, 300)).sum().backward())


def _lose(rank: int, folder: Path, exchange: Callable[[], object]) -> None:
    for _ in range(2):  # DDP's second forward pass exchanges too
        exchange()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(3):
            exchange()
    except RuntimeError as error:
        (folder / f"error{rank}").write_text(str(error))
    os._exit(0)

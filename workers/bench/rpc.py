"""Peer `rpc`: a parameter server on torch.distributed.rpc, as PyTorch's tutorial writes one, tuned.

A worker sends every slice as a call of its own; the call is answered with the
stepped values once all ranks' gradients are there (`async_execution`), so that
slices overlap: of 4, 10 and 25 MiB the smallest were the fastest. The server
runs `main` with the job as its argument.
"""

from __future__ import annotations

import sys
import threading

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.futures import Future

from hubring.workers.bench.job import Job
from hubring.workers.bench.model import Bucket
from hubring.workers.bench.side import FlatSide

_SERVER = "server"
_THREADS = 4
_SERVING: list[Shard] = []
"""The server's slices, in its process: a remote call names a function, not an object."""


class Rpc(FlatSide):
    """A worker; what it steps with is on the server."""

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__(job, rank, job.slice_bytes)
        # Storages of their own: of a part of a larger one, RPC would send a copy.
        self._given = [torch.from_numpy(bucket.gradients.numpy()) for bucket in self._buckets]
        _join(job, f"worker-{rank}", rank)

    def step(self) -> None:
        calls = [
            rpc.rpc_async(_SERVER, push_pull, args=(number, gradients))
            for number, gradients in enumerate(self._given)
        ]
        for bucket, call in zip(self._buckets, calls, strict=True):
            bucket.values.copy_(call.wait())

    def close(self) -> None:
        rpc.shutdown()


class Shard:
    """One slice on the server, and the round under way."""

    def __init__(self, job: Job, numel: int) -> None:
        self._size = job.size
        self._bucket = Bucket(job.optimizer, torch.zeros(numel), torch.empty(0), job.size)
        self._lock = threading.Lock()
        self._given = 0
        self._answer: Future[Tensor] = Future()

    def push(self, gradients: Tensor) -> Future[Tensor]:
        """Adds a rank's gradients, which are the server's to keep; the answer is the same for all ranks."""
        with self._lock:
            answer = self._answer
            self._given += 1
            if self._given == 1:
                self._bucket.gradients = gradients
            else:
                self._bucket.gradients.add_(gradients)
            if self._given < self._size:
                return answer
            self._given, self._answer = 0, Future()
            self._bucket.step()
        answer.set_result(self._bucket.values)
        return answer


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def push_pull(number: int, gradients: Tensor) -> Future[Tensor]:
    """On the server: takes a rank's gradients of a slice; the answer is its values after the step."""
    return _SERVING[number].push(gradients)


def _join(job: Job, name: str, rank: int) -> None:
    # torch's first choice, its transport over shared memory, spins while it waits, through the other rows'
    # turns. Here sockets carry the words, and payloads are read from the sender's memory.
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=_THREADS,
        init_method=f"file://{job.place / 'store'}",
        _transports=["uv"],
        _channels=["cma", "basic"],
    )
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        name, rank=rank, world_size=job.size + 1, rpc_backend_options=options
    )


def main() -> None:
    """Serves until all workers have left."""
    torch.set_num_threads(1)  # as a shard does
    job = Job.decode(sys.argv[1])
    parts = torch.split(torch.empty(job.nbytes // 4, device="meta"), job.slice_bytes // 4)
    _SERVING.extend(Shard(job, part.numel()) for part in parts)
    _join(job, _SERVER, job.size)
    rpc.shutdown()

"""The ring's communicator: gradients are averaged by Gloo or NCCL, every worker steps for itself."""

from __future__ import annotations

from itertools import zip_longest

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ps.errors import ConfigError, HubringError, RingBroken
from ps.messages import Collective, ReduceOp
from ps.traffic import Traffic
from ps.types import BucketSpec, Hyper
from ps.work import Work
from workers import ring_collectives
from workers.bucketing import Bucket
from workers.communicator import CollectiveWork, Communicator, Start
from workers.ring import Ring
from workers.ring_group import ring_store
from workers.ring_work import RingWork

__all__ = ["AllreduceCommunicator", "ring_store"]


class AllreduceCommunicator(Communicator):
    """Talks to all other ranks directly.

    `traffic` holds what a ring sends for the gradients, computed rather than
    counted: 2(n-1)/n of their bytes a step and rank, and as much received.

    Args:
        rank: This worker's.
        size: How many there are.
        store: Where ranks find each other; `ring_store` makes one.
        backend: `gloo`, or `nccl` where every rank has a GPU of its own.
        device: Where the model lives.
        host: This worker's address as the others reach it; None finds it by the store.
        timeout: Seconds that one exchange may take.

    Raises:
        ConfigError: The backend does not exist here, or does not fit the device.
        RingBroken: The ranks did not find each other.
    """

    topology = "ring"
    joins = True
    steps_on = "worker"

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        *,
        backend: str = "gloo",
        device: torch.device | str = "cpu",
        host: str | None = None,
        timeout: float = 300.0,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.traffic = Traffic()
        self.ring = Ring(
            rank, size, store, backend=backend, device=torch.device(device), host=host, timeout=timeout
        )

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)

    def attach(self, buckets: list[Bucket]) -> Start:
        self._compare([bucket.spec for bucket in buckets])
        for bucket in buckets:
            what = f"the first parameters of bucket {bucket.spec.index}"
            ring_collectives.broadcast_into(self.ring, bucket.values, 0, what)
        return Start()

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        gradients, size = bucket.gradients, self.size
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
        work = RingWork(f"the exchange of bucket {bucket.spec.index}", lambda: gradients.div_(size))
        self.ring.start(work, lambda group: group.allreduce([gradients], options))
        travelled = 2 * (size - 1) * gradients.nbytes // size
        self.traffic.bytes_sent += travelled
        self.traffic.bytes_received += travelled
        return work

    def collective(
        self,
        collective: Collective,
        tensor: torch.Tensor | None,
        *,
        name: str,
        op: ReduceOp = ReduceOp.AVERAGE,
        root: int = 0,
    ) -> CollectiveWork:
        """As the interface says, and done when this returns: ranks must call in the same order."""
        work = CollectiveWork(f"{collective.name.lower()} {name!r}")
        try:
            result = ring_collectives.run(self.ring, collective, tensor, name, op, root)
        except HubringError as error:
            work.fail(error)
            return work
        if result is not None:
            work.result = result if tensor is None else result.to(tensor.device)
        work.complete_part()
        return work

    def fail(self, error: HubringError) -> None:
        """Ends every exchange, from any thread: somebody knows that the ring cannot go on."""
        self.ring.fail(error)

    def close(self, *, finished: bool) -> None:
        if not finished:  # what is under way may never end: do not wait for it
            self.fail(RingBroken("this worker left the ring before it was done"))
        self.ring.close()

    def _compare(self, specs: list[BucketSpec]) -> None:
        """Makes sure that all ranks hold the same model, in the same buckets."""
        mine = [line for spec in specs for line in _lines(spec)]
        texts = self.ring.gather("comparing models", _encode(mine))
        first, *others = [_decode(text) for text in texts]
        for rank, other in enumerate(others, start=1):
            for here, there in zip_longest(first, other, fillvalue="nothing more"):
                if here != there:
                    raise ConfigError(
                        f"rank {rank} trains another model than rank 0: it has {there}, where rank 0 has "
                        f"{here}; start all ranks with the same script and arguments"
                    )


def _lines(spec: BucketSpec) -> list[str]:
    """One line a parameter, with all that ranks must agree on."""
    return [
        f"{tensor.name} {spec.dtype}{list(tensor.shape)} (bucket {spec.index}, group {spec.group})"
        for tensor in spec.tensors
    ]


def _encode(lines: list[str]) -> torch.Tensor:
    return torch.frombuffer(bytearray("\n".join(lines).encode()), dtype=torch.uint8)


def _decode(text: torch.Tensor) -> list[str]:
    return bytes(text.tolist()).decode().split("\n")

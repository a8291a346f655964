"""The ring's communicator: gradients are averaged by Gloo or NCCL, every worker steps for itself."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from weakref import WeakKeyDictionary

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hubring.ps.compression.compressor import codec_for
from hubring.ps.core.codecs import parse
from hubring.ps.core.counters import Traffic
from hubring.ps.core.errors import ConfigError, HubringError, RingBroken
from hubring.ps.core.messages import Call, Collective
from hubring.ps.core.types import BucketSpec, Hyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucketing import Bucket
from hubring.workers.communicators import ring_collectives
from hubring.workers.communicators.base import CollectiveWork, Communicator, Start
from hubring.workers.communicators.powersgd import LowRankMean
from hubring.workers.communicators.ring_gradient_mean import RingMean, ring_mean
from hubring.workers.communicators.ring_group import own_address, ring_store
from hubring.workers.communicators.ring_process_group import Ring
from hubring.workers.communicators.ring_scheduler import RingScheduler
from hubring.workers.communicators.transfers import Transfers

__all__ = ["AllreduceCommunicator", "ring_store"]

log = logging.getLogger(__name__)


class AllreduceCommunicator(Communicator):
    """Talks to all other ranks directly.

    `traffic` holds what a ring sends for the gradients, computed rather than
    counted: 2(n-1)/n of their bytes a step and rank, and as much received; of a
    codec whose payloads are gathered (`hubring.workers.communicators.ring_gradient_mean`), n-1 payloads.

    Args:
        rank: This worker's.
        size: How many there are.
        store: Where ranks find each other; `ring_store` makes one.
        backend: `gloo`, or `nccl` where every rank has a GPU of its own.
        device: Where the model lives.
        host: This worker's address as the others reach it; None finds it by the store.
        timeout: Seconds that one exchange may take.
        compress: What gradients are compressed with, as `hubring.ps.core.codecs` spells it; empty: nothing.

    Raises:
        ConfigError: The backend does not exist here, or does not fit the device.
        RingBroken: The ranks did not find each other.
    """

    topology = "ring"
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
        compress: str = "",
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout: float = timeout
        self.traffic = Traffic()
        # What a codec left out is kept for each bucket, so buckets then stay what they are.
        self.joins = self.tunable = not compress
        self._compress = compress
        # Several optimizers may have buckets here, and those that were joined live for a trial: what is
        # kept of one holds its tensors but not the bucket, and goes with it.
        self._means: WeakKeyDictionary[Bucket, list[RingMean]] = WeakKeyDictionary()
        """One, or one for each phase of a low-rank mean."""
        self._low_rank: WeakKeyDictionary[Bucket, LowRankMean] = WeakKeyDictionary()
        self._open = partial(Ring, rank, size, backend=backend, device=torch.device(device), timeout=timeout)
        self._store, self._host = store, host
        self.ring = self._open(store=store, host=host)
        self._rings = [self.ring]
        self._schedulers: dict[tuple[int, ...], RingScheduler] = {
            (): self._scheduler(range(size), PrefixStore("collectives", store))
        }
        """By members; none: all."""
        self._transfers = Transfers(self._schedulers[()].ring)
        self._users: Counter[tuple[int, ...]] = Counter()
        self._met: Counter[tuple[int, ...]] = Counter()

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)

    def attach(self, buckets: list[Bucket]) -> Start:
        self._compare([bucket.spec for bucket in buckets])
        if self._compress.startswith("powersgd:") and len(self._rings) == 1:
            # All ranks must begin a ring's operations in one order. Second phases begin when first ones
            # end, which is whenever: among themselves in one order, so they have a ring of their own.
            host = self._host or own_address(self._store)
            self._rings.append(self._open(store=PrefixStore("second", self._store), host=host))
        for bucket in buckets:
            what = f"the first parameters of bucket {bucket.spec.index}"
            ring_collectives.broadcast_into(self.ring, bucket.values, 0, what)
            self._prepare(bucket)
        self._warn_of_waste(buckets)
        return Start()

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        index = bucket.spec.index
        if bucket not in self._means:  # several that were joined
            self._prepare(bucket)
        means, low_rank = self._means[bucket], self._low_rank.get(bucket)
        travels = sum(mean.travels for mean in means)
        self.traffic.bytes_sent += travels
        self.traffic.bytes_received += travels
        if low_rank is None:
            return means[0].start(f"the exchange of bucket {index}")
        return low_rank.exchange(lambda phase: means[phase].start(f"the factors of bucket {index}"))

    def take_part(self, call: Call, tensors: tuple[torch.Tensor, ...], work: CollectiveWork) -> None:
        if call.collective is Collective.TRANSFER:
            self._transfers.take_part(call, tensors, work)
        elif call.collective is Collective.JOIN:
            self._join(call, work)
        else:
            self._schedulers[call.ranks].take_part(call, tensors, work)

    def open_group(self, ranks: tuple[int, ...]) -> None:
        """As the interface says. Members that call at the same time meet in a process group of their own."""
        self._users[ranks] += 1
        if ranks not in self._schedulers:
            self._met[ranks] += 1
            store = PrefixStore(f"group {ranks} {self._met[ranks]}", self._store)
            self._schedulers[ranks] = self._scheduler(ranks, store)

    def close_group(self, ranks: tuple[int, ...]) -> None:
        self._users[ranks] -= 1
        if not self._users[ranks]:
            self._schedulers.pop(ranks).close()

    def _join(self, call: Call, work: CollectiveWork) -> None:
        """Every group that this rank is in must know."""
        schedulers = list(self._schedulers.values())
        parts = [CollectiveWork(call, list, self) for _ in schedulers]
        joined = Work(work.what, len(parts))

        def on_end(_: Work) -> None:
            if joined.error is None:
                work.deliver(parts[0].result)  # that of all ranks
            else:
                work.fail(joined.error)

        for scheduler, part in zip(schedulers, parts, strict=True):
            part.when_done(lambda it: joined.fail(it.error) if it.error else joined.complete_part())
            scheduler.take_part(call, (), part)
        joined.when_done(on_end)

    def _scheduler(self, members: Sequence[int], store: Store) -> RingScheduler:
        """Collectives are agreed on and carried by Gloo, through host memory, whatever carries gradients."""
        ring = Ring(
            members.index(self.rank),
            len(members),
            store,
            backend="gloo",
            device=torch.device("cpu"),
            host=self._host or own_address(self._store),
            timeout=self.timeout,
            patient=True,
        )
        return RingScheduler(ring, members)

    def fail(self, error: HubringError) -> None:
        """Ends every exchange, from any thread: somebody knows that the ring cannot go on."""
        for ring in [*self._rings, *[scheduler.ring for scheduler in list(self._schedulers.values())]]:
            ring.fail(error)

    def close(self, *, finished: bool) -> None:
        if not finished or not self._transfers.idle:  # what is under way may never end: do not wait for it
            self.fail(RingBroken("this worker left the ring before it was done"))
        for scheduler in self._schedulers.values():
            scheduler.close()
        for ring in self._rings:
            ring.close()

    def _prepare(self, bucket: Bucket) -> None:
        """Settles how the bucket travels."""
        gradients = bucket.gradients
        if self._compress.startswith("powersgd:"):
            rank = int(parse(self._compress).argument)
            low_rank = self._low_rank[bucket] = LowRankMean(bucket.spec, gradients, rank, self.allocate)
            pairs = zip(self._rings, low_rank.phases, strict=True)
            self._means[bucket] = [ring_mean(ring, phase, None) for ring, phase in pairs]
            return
        codec = codec_for(self._compress, gradients.numel(), gradients.dtype)
        self._means[bucket] = [ring_mean(self.ring, gradients, codec)]

    def _warn_of_waste(self, buckets: list[Bucket]) -> None:
        """Payloads that all gather may be more than tensors that are summed."""
        travels = sum(mean.travels for bucket in buckets for mean in self._means[bucket])
        plain = 2 * (self.size - 1) * sum(bucket.gradients.nbytes for bucket in buckets) // self.size
        if self._compress and self.rank == 0 and self.size > 1 and travels >= plain:
            log.warning(
                "--compress %s saves nothing around a ring of %d: every rank sends %d bytes a step, and"
                " %d without it; take bf16, or a hub with --aggregate",
                self._compress,
                self.size,
                travels,
                plain,
            )

    def _compare(self, specs: list[BucketSpec]) -> None:
        """Makes sure that all ranks hold the same model, in the same buckets, and compress alike."""
        mine = [f"--compress {self._compress or 'not given'}"]
        mine += [line for spec in specs for line in _lines(spec)]
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

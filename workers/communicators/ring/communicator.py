"""The ring's communicator: shared memory, Gloo or NCCL averages gradients, and every worker steps."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import zip_longest
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hubring.ps.compression.codecs import Half
from hubring.ps.compression.compressor import codec_for
from hubring.ps.core.counters import Traffic
from hubring.ps.core.errors import ConfigError, HubringError, RingBroken
from hubring.ps.core.messages import Call, Collective
from hubring.ps.core.types import BucketSpec, StepHyper, parse_codec
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.communicators.base import CollectiveWork, Communicator, ParameterState
from hubring.workers.communicators.powersgd import LowRankMean
from hubring.workers.communicators.residuals import Residual, residuals_in
from hubring.workers.communicators.ring import collectives
from hubring.workers.communicators.ring.collectives import PIECE, Gathered, RingMean, ring_mean
from hubring.workers.communicators.ring.group import RingStore
from hubring.workers.communicators.ring.process_group import Ring, Witness
from hubring.workers.communicators.ring.results import CallResults
from hubring.workers.communicators.ring.scheduler import RingScheduler
from hubring.workers.communicators.ring.transfers import Transfers
from hubring.workers.communicators.ring.two_levels import open_two_levels

log = logging.getLogger(__name__)


class AllreduceCommunicator(Communicator):
    """Exchanges with all other ranks directly. Connects in the first exchange of all ranks.

    `traffic` is computed, not counted. Per step, a rank sends and receives 2(n-1)/n of the
    gradients' bytes; with a codec whose payloads are gathered
    (`hubring.workers.communicators.ring.collectives`), n-1 payloads. With `local`, the first rank
    of a host does so for it, with one of each other host.

    Args:
        rank: This worker's rank.
        size: Number of workers.
        store: The store through which ranks connect.
        host: This worker's address for the other ranks.
        backend: See `Ring`. `nccl` if every rank has its own GPU.
        device: The model's device.
        timeout: Seconds that one exchange may take.
        compress: Codec of the gradients, as in `hubring.ps.core.types`; empty: no compression.
        connect_timeout: Seconds that connecting may take; None: `timeout`.
        results: Keeps results of collectives among all ranks, for ranks that lack them after a loss. With it,
            `abort` may be called.
        local: This worker's host, if workers of one host exchange gradients among themselves first; else
            empty.
    """

    topology = "ring"
    steps_on = "worker"
    sums_presence = True

    def __init__(
        self,
        rank: int,
        size: int,
        store: RingStore,
        *,
        host: str,
        backend: str | None = None,
        device: torch.device | str = "cpu",
        timeout: float = 300.0,
        compress: str = "",
        connect_timeout: float | None = None,
        results: CallResults | None = None,
        local: str = "",
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout: float = timeout
        self.traffic = Traffic()
        # A codec has a residual for each bucket, so buckets must not be joined or regrouped.
        self.joins = self.tunable = not compress
        self._compress = compress
        # Weak keys: joined buckets only live for a tuning trial. The values do not reference the bucket.
        self._means: WeakKeyDictionary[Bucket, _Means] = WeakKeyDictionary()
        self._connect = partial(
            Ring, host=host, timeout=timeout, connect_timeout=connect_timeout, abortable=results is not None
        )
        self._device = torch.device(device)
        self._attached = 0
        """How often buckets were attached: two optimizers can have parameters of one name."""
        self._results = results
        self._store, self._host, self._backend = store, host, backend
        self._local, self._connect_seconds = local, connect_timeout or timeout
        self._rings: list[Ring] = []
        self._beside: list[Ring] = []
        """The ring of the transfers, if it is not that of the collectives."""
        self._schedulers: dict[tuple[int, ...], RingScheduler] = {}
        """By members; the empty tuple is all ranks."""
        self._transfers = Transfers()
        self._connecting = threading.Lock()
        self._error: HubringError | None = None
        self._users: Counter[tuple[int, ...]] = Counter()
        self._met: Counter[tuple[int, ...]] = Counter()

    def connect(self) -> None:
        """Connects to all other ranks, once. The first exchange of all ranks calls it.

        Until every rank has come, none has exchanged anything, so a new worker can take a lost one's rank.

        Raises:
            ConfigError: The backend is not available, or does not support the device.
            DeadlineExceeded: A rank did not come.
            RingBroken: The ranks could not connect to each other.
        """
        with self._connecting:
            if () in self._schedulers:
                return
            if self._results is None:  # members of a ring that heals have met
                with self.waiting:
                    self._store.meet(self.rank, self.size)
            try:
                self._open_all()
            except HubringError as error:
                if self._results is not None:
                    self.abort(error)  # or the other members would wait for this one
                raise
            hosts = f", {self.ring.hosts} hosts (--local)" if self.ring.hosts else ""
            log.info("rank %d of %d, ring over %s%s", self.rank, self.size, self.backend, hosts)
        if self._error is not None:
            self.fail(self._error)

    def _open_all(self) -> None:
        witness, everyone = None, range(self.size)
        if self._results is not None and self._backend == "nccl":
            witness = Witness(self._open_on_host(everyone, "witness", "gloo"))
        try:
            self.ring = self._open("gradients", witness)
        except HubringError as error:
            if witness is not None:
                witness.abort(error)
            raise
        self._rings.append(self.ring)
        self.backend = self.ring.backend
        collectives = self._open_on_host(everyone, "collectives")
        self._schedulers[()] = RingScheduler(collectives, everyone, self._results)
        self._transfers.ring = collectives
        if collectives.backend == "shm":  # which runs one operation at a time
            self._transfers.ring = self._open_on_host(everyone, "transfers", "gloo")
            self._beside.append(self._transfers.ring)

    def _open(self, name: str, witness: Witness | None = None) -> Ring:
        """Opens a ring of all ranks for gradients."""
        me, store, group = (self.rank, self.size), self._store.within(name), None
        if self._local:
            group = open_two_levels(*me, store, self._local, self._host, self._connect_seconds)
        return self._connect(
            *me, store, backend=self._backend, device=self._device, witness=witness, group=group
        )

    def attach(self, buckets: list[Bucket], state: Mapping[str, ParameterState] | None = None) -> int:
        self.connect()
        check_same_model(
            [bucket.spec for bucket in buckets],
            self._compress,
            lambda text: self.ring.gather("comparing models", text),
        )
        if self._compress.startswith("powersgd:") and len(self._rings) == 1:
            # All ranks must start a ring's operations in the same order. Second phases start when first
            # phases end: in order among themselves, but at any time. So they use a second ring.
            self._rings.append(self._open("second"))
        self._attached += 1
        for bucket in buckets:
            what = f"the first parameters of bucket {bucket.spec.index}"
            collectives.broadcast_into(self.ring, bucket.values, 0, what)
            self._prepare(bucket)
        self._warn_of_waste(buckets)
        return 0

    def push_pull(self, bucket: Bucket, hyper: StepHyper) -> Work:
        index = bucket.spec.index
        if bucket not in self._means:  # a joined bucket
            self._prepare(bucket)
        means = self._means[bucket]
        self.traffic.bytes_sent += means.travels
        self.traffic.bytes_received += means.travels
        if means.presence is not None:  # operations end in order, so this one ends before the bucket's work
            assert bucket.presence is not None
            means.presence.start(f"which ranks have gradients of bucket {index}", bucket.presence)
        low_rank = means.low_rank
        if low_rank is None:
            flat = bucket.memory if means.presence is None else bucket.gradients
            return means.phases[0].start(f"the exchange of bucket {index}", flat)
        return low_rank.exchange(
            bucket.gradients,
            lambda phase: means.phases[phase].start(f"the factors of bucket {index}", low_rank.phases[phase]),
        )

    def residuals(self) -> Iterator[Residual]:
        for bucket, means in self._means.items():
            if means.low_rank is not None:
                yield from means.low_rank.residuals(means.prefix)
            elif isinstance(mean := means.phases[0], Gathered):
                for number, residual in enumerate(mean.residuals):
                    yield from residuals_in(residual, number * PIECE, bucket.spec.tensors, means.prefix)

    def average(self, what: str, flat: torch.Tensor) -> Work:
        """Starts to replace a flat tensor with its mean over all ranks, sent in the codec's dtype."""
        mean = ring_mean(self.ring, flat, codec_for(self._compress, flat.numel(), flat.dtype))
        self.traffic.bytes_sent += mean.travels
        self.traffic.bytes_received += mean.travels
        return mean.start(what, flat)

    def take_part(self, call: Call, tensors: tuple[torch.Tensor, ...], work: CollectiveWork) -> None:
        if not call.ranks or call.collective is Collective.TRANSFER:
            self.connect()
        if call.collective is Collective.TRANSFER:
            self._transfers.take_part(call, tensors, work)
        elif call.collective is Collective.JOIN:
            self._join(call, work)
        else:
            self._schedulers[call.ranks].take_part(call, tensors, work)

    def open_group(self, ranks: tuple[int, ...]) -> None:
        """Opens a process group of the members, unless they already have one."""
        self._users[ranks] += 1
        if ranks not in self._schedulers:
            self._met[ranks] += 1
            # The server's keys cannot hold the names of many ranks.
            name = sha256(str(ranks).encode()).hexdigest()[:16]
            ring = self._open_on_host(ranks, f"{name}.{self._met[ranks]}")
            self._schedulers[ranks] = RingScheduler(ring, ranks)

    def close_group(self, ranks: tuple[int, ...]) -> None:
        self._users[ranks] -= 1
        if not self._users[ranks]:
            self._schedulers.pop(ranks).close()

    def _join(self, call: Call, work: CollectiveWork) -> None:
        """Joins every group of this rank."""
        schedulers = list(self._schedulers.values())
        parts = [CollectiveWork(call, list, self) for _ in schedulers]
        # On a ring that heals, the join of all ranks counts in the note, whatever becomes of a group.
        needed = parts if self._results is None else parts[:1]
        joined = Work(work.what, len(parts))

        def on_end(_: Work) -> None:
            if joined.error is None:
                work.deliver(parts[0].result)  # the result of the group of all ranks
            else:
                work.fail(joined.error)

        for scheduler, part in zip(schedulers, parts, strict=True):
            part.when_done(
                lambda it: joined.fail(it.error) if it.error and it in needed else joined.complete_part()
            )
            scheduler.take_part(call, (), part)
        joined.when_done(on_end)

    def _open_on_host(self, members: Sequence[int], name: str, backend: str | None = None) -> Ring:
        """Opens a ring in host memory, whose operations have no timeout, also with NCCL for gradients."""
        return self._connect(
            members.index(self.rank),
            len(members),
            self._store.within(name),
            backend=backend or ("gloo" if self._backend == "nccl" else self._backend),
            device=torch.device("cpu"),
            patient=True,
        )

    def is_held(self) -> bool:
        return self._transfers.idle and not any(one.runs for one in list(self._schedulers.values()))

    def fail(self, error: HubringError) -> None:
        """Fails every exchange. The session calls it, from any thread, when the ring cannot continue."""
        self._error = error
        schedulers = list(self._schedulers.values())
        for ring in [*self._rings, *self._beside, *[scheduler.ring for scheduler in schedulers]]:
            ring.fail(error)

    def abort(self, error: HubringError) -> None:
        """Ends all exchanges on all ranks, and waits until none is left on this one; it needs `results`."""
        for scheduler in list(self._schedulers.values()):  # a thread may open a group
            scheduler.abort(error)
        for ring in (*self._rings, *self._beside):
            ring.abort(error)

    def close(self, *, finished: bool) -> None:
        if not finished or not self._transfers.idle:  # do not wait for exchanges that may never end
            self.fail(RingBroken(f"rank {self.rank} left the ring before its exchanges were done"))
        for scheduler in self._schedulers.values():
            scheduler.close()
        for ring in (*self._rings, *self._beside):
            ring.close()

    def _prepare(self, bucket: Bucket) -> None:
        """Chooses how the bucket is averaged."""
        gradients = bucket.gradients
        presence = None if bucket.presence is None else ring_mean(self.ring, bucket.presence, None)
        if self._compress.startswith("powersgd:"):
            rank = int(parse_codec(self._compress).argument)
            low_rank = LowRankMean(bucket.spec, gradients.dtype, rank, self.allocate)
            pairs = zip(self._rings, low_rank.phases, strict=True)
            phases = [ring_mean(ring, phase, None) for ring, phase in pairs]
            self._means[bucket] = _Means(phases, presence, low_rank, self._prefix)
            return
        codec = codec_for(self._compress, gradients.numel(), gradients.dtype)
        if codec is None or isinstance(codec, Half):  # the presence behind the gradients is summed with them
            self._means[bucket] = _Means([ring_mean(self.ring, bucket.memory, codec)])
        else:
            mean = ring_mean(self.ring, gradients, codec)
            self._means[bucket] = _Means([mean], presence, prefix=self._prefix)

    @property
    def _prefix(self) -> str:
        return "" if self._attached == 1 else f"{self._attached}: "

    def _warn_of_waste(self, buckets: list[Bucket]) -> None:
        """Warns if compression does not reduce traffic: gathered payloads can be more than summed tensors."""
        travels = sum(self._means[bucket].travels for bucket in buckets)
        size = self.ring.exchangers
        plain = 2 * (size - 1) * sum(bucket.gradients.nbytes for bucket in buckets) // size
        if self._compress and self.rank == 0 and self.size > 1 and travels >= plain:
            log.warning(
                "--compress %s saves nothing on a ring of %d: every rank sends %d bytes per step, and %d"
                " without compression; use --compress bf16, or a hub with --aggregate",
                self._compress,
                self.size,
                travels,
                plain,
            )


class _Means(NamedTuple):
    """How one bucket is averaged.

    Attributes:
        phases: The means of its exchange: one, or with PowerSGD two, one after the other.
        presence: The sum of its presence, if that does not travel with the gradients.
        low_rank: PowerSGD's factors.
        prefix: Begins the names of its residuals.
    """

    phases: list[RingMean]
    presence: RingMean | None = None
    low_rank: LowRankMean | None = None
    prefix: str = ""

    @property
    def travels(self) -> int:
        """Bytes that each rank sends and receives."""
        return sum(mean.travels for mean in self.phases)


Gather = Callable[[Tensor], Sequence[Tensor]]
"""Returns every rank's flat uint8 tensor, in rank order."""


def check_same_model(specs: Sequence[BucketSpec], compress: str, gather: Gather) -> None:
    """Compares this rank's buckets with those of the other ranks, which all call it.

    Raises:
        ConfigError: Two ranks differ. The error names the first difference.
    """
    mine = [f"--compress {compress or 'not given'}", *(line for spec in specs for line in _lines(spec))]
    given = torch.frombuffer(bytearray("\n".join(mine).encode()), dtype=torch.uint8)
    first, *others = [bytes(text.tolist()).decode().split("\n") for text in gather(given)]
    for rank, other in enumerate(others, start=1):
        for here, there in zip_longest(first, other, fillvalue="nothing more"):
            if here != there:
                raise ConfigError(
                    f"rank {rank} and rank 0 train different models: rank {rank} has {there}, rank 0 has"
                    f" {here}; start all ranks with the same script and arguments"
                )


def _lines(spec: BucketSpec) -> list[str]:
    """Returns one line per parameter with everything that ranks must agree on."""
    return [
        f"{tensor.name} {spec.dtype}{list(tensor.shape)} (bucket {spec.index})" for tensor in spec.tensors
    ]

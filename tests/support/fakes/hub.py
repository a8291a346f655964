"""A hub in this process with ranks on threads, for tests of optimizers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

import torch

from hubring.ps.core.counters import Traffic
from hubring.ps.core.messages import Call, Collective, ReduceOp
from hubring.ps.core.types import Hyper, HyperTable, StepHyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.communicators.base import CollectiveWork, Communicator, ParameterState, SteppingHub

T = TypeVar("T")
Done = Callable[[torch.Tensor], None]
Part = tuple[torch.Tensor, Done]

LIMIT = 5.0
"""Seconds after which a waiting rank is a bug."""


class FakeHub:
    """Averages each bucket's gradients over all ranks, then applies SGD with the pushed learning rate."""

    def __init__(self, size: int, steps_on: Literal["server", "worker"] = "server") -> None:
        self.size = size
        self.steps_on = steps_on
        self.start = 0
        self.lock = threading.Lock()
        self.values: dict[int, torch.Tensor] = {}
        self.parts: dict[object, dict[int, Part]] = {}
        self.state: dict[str, ParameterState] = {}
        self.absent: dict[int, list[frozenset[int]]] = {}
        """By bucket: what each rank had no gradient of, in the open round."""

    def meet(
        self, key: object, rank: int, tensor: torch.Tensor, done: Done
    ) -> list[tuple[torch.Tensor, Done]]:
        """Collects one tensor per rank; the last rank gets all tensors and callbacks, in rank order."""
        with self.lock:
            parts = self.parts.setdefault(key, {})
            parts[rank] = (tensor.clone(), done)
            if len(parts) < self.size:
                return []
            del self.parts[key]
            return [parts[rank] for rank in sorted(parts)]

    def run(self, action: Callable[[FakeRank], T]) -> list[T]:
        """Runs `action` once per rank, each on a thread; returns the results in rank order."""
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(action, FakeRank(self, rank)) for rank in range(self.size)]
            return [future.result(LIMIT) for future in futures]


class FakeRank(Communicator, SteppingHub):
    """One rank's communicator; `log` lists its calls, in order."""

    topology = "hub"
    weighs = True

    def __init__(self, hub: FakeHub, rank: int = 0) -> None:
        self.hub = hub
        self.rank = rank
        self.size = hub.size
        self.steps_on = hub.steps_on
        self.stepping_hub = self if hub.steps_on == "server" else None
        self.timeout = LIMIT
        self.traffic = Traffic()
        self.log: list[str] = []
        self.hypers: list[Hyper] = []
        self.pushed: list[torch.Tensor] = []
        self._rounds = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)

    def attach(self, buckets: list[Bucket], state: Mapping[str, ParameterState] | None = None) -> int:
        for bucket in buckets:
            whole = self._wait_for(Collective.BROADCAST, bucket.values, f"values {bucket.spec.index}")
            self.hub.values[bucket.spec.index] = whole.clone()
            bucket.values.copy_(whole)
        self.log.clear()
        return self.hub.start

    def push_pull(self, bucket: Bucket, hyper: StepHyper) -> Work:
        assert not isinstance(hyper, HyperTable), "this hub has one rate for all parameters"
        self.log.append(f"push {bucket.spec.index}")
        self.hypers.append(hyper)
        self.pushed.append(bucket.gradients.clone())
        work = Work(f"bucket {bucket.spec.index}")

        lacking = self.hub.absent.setdefault(bucket.spec.index, [])
        with self.hub.lock:
            lacking.append(bucket.absent)

        def take(result: torch.Tensor) -> None:
            target = bucket.values if self.steps_on == "server" else bucket.gradients
            target.copy_(result)
            bucket.absent = nowhere
            work.complete_part()

        nowhere: frozenset[int] = frozenset()
        parts = self.hub.meet(("push", bucket.spec.index), self.rank, bucket.gradients, take)
        if parts:
            nowhere = frozenset.intersection(*lacking)
            lacking.clear()
            mean = sum((gradient for gradient, _ in parts), torch.zeros(())) / self.size
            if self.steps_on == "server":
                mean = self.hub.values[bucket.spec.index].sub_(hyper["lr"] * mean)
            for _, done in parts:
                done(mean)
        return work

    def pull(self, bucket: Bucket) -> Work:
        self.log.append(f"pull {bucket.spec.index}")
        bucket.host_values.copy_(self.hub.values[bucket.spec.index])
        return Work("pull", 0)

    def keep_parameters(self) -> None:
        """Does nothing: no memory is shared."""

    def write_parameters(self, bucket: Bucket, positions: Collection[int]) -> None:
        raise NotImplementedError("no test changes parameters of this hub")

    def read_state(self, buckets: Sequence[Bucket]) -> dict[str, dict[str, torch.Tensor]]:
        return {name: dict(state) for name, state in self.hub.state.items()}

    def write_state(self, buckets: Sequence[Bucket], states: Mapping[str, ParameterState]) -> None:
        self.hub.state = dict(states)

    def take_part(self, call: Call, tensors: tuple[torch.Tensor, ...], work: CollectiveWork) -> None:
        self.log.append(f"{call.collective.name.lower()} {call.name}")
        given = tensors[0] if tensors else torch.empty(0)
        parts = self.hub.meet(
            ("collective", call.name), self.rank, given, lambda result: work.deliver([result.clone()])
        )
        if parts:
            tensors = tuple(given for given, _ in parts)
            if call.collective is Collective.BROADCAST:
                result = tensors[call.root]
            else:
                assert call.op is ReduceOp.MAX
                result = torch.stack(tensors).amax(0)
            for _, done in parts:
                done(result)

    def close(self, *, finished: bool) -> None:
        """Does nothing."""

    def _wait_for(self, collective: Collective, tensor: torch.Tensor, name: str) -> torch.Tensor:
        result = self.collective(Call(collective, name), tensor).get()
        assert isinstance(result, torch.Tensor)
        return result

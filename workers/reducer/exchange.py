"""One step's exchange: sends every bucket once, in order, and waits for it now or later.

Invariant: groups are sent in the same order on every rank, independent of the order in
which backward finishes buckets. A ring needs that.

A step can leave its exchange in flight (`leave`). Each such bucket is settled when it is
needed. Until then its memory belongs to the communicator and must not change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import Hyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.bucketing import move_gradients
from hubring.workers.buckets.value_memory import Look
from hubring.workers.communicators.base import Communicator
from hubring.workers.reducer.bucket_group import BucketGroup, bucket_groups
from hubring.workers.runtime.in_flight import FlightRecorder


class InFlight(NamedTuple):
    """A bucket in flight. Buckets of a joined group share one work."""

    bucket: Bucket
    work: Work
    changes: int
    """`bucket.changes` when it was sent."""


class Exchange:
    """Sends buckets as early as the order allows.

    Attributes:
        seconds: Seconds so far that training spent sending buckets and waiting for exchanges.
        steps: Completed steps.
        timeout: Seconds that one step's exchange may take; None: no limit.
    """

    def __init__(
        self,
        communicator: Communicator,
        buckets: list[Bucket],
        hyper: Callable[[Bucket], Hyper],
        left_out: Callable[[Bucket], frozenset[int]],
        recorder: FlightRecorder | None = None,
    ) -> None:
        self.seconds = 0.0
        self.steps = 0
        self._recorder = recorder
        self._communicator = communicator
        self._buckets = buckets
        self._hyper = hyper
        self._left_out = left_out
        self.timeout: float | None = None
        self._deadline: float | None = None
        self._ready: set[int] = set()
        self._groups: list[BucketGroup] = []
        self._sent = 0
        self._regroups = False
        self._under_way: list[InFlight] = []
        self._left: dict[int, InFlight] = {}
        self._then: Callable[[Bucket], None] = _nothing
        self.group(0)

    @property
    def begun(self) -> bool:
        """Whether some bucket of this step was sent."""
        return self._sent > 0

    @property
    def complete(self) -> bool:
        """Whether every bucket of this step was sent."""
        return self._sent == len(self._groups)

    @property
    def devices(self) -> set[torch.device]:
        """The CUDA devices that hold gradients."""
        return {bucket.gradients.device for bucket in self._buckets if bucket.gradients.is_cuda}

    # Sending.

    def sizes(self, sizes: Iterable[int]) -> list[int]:
        """Returns the sizes that give different groups; of sizes that give the same groups, the first."""
        cuts: dict[tuple[int, ...], int] = {}
        for nbytes in sizes:
            grouped = bucket_groups(self._buckets, nbytes, joined=False)
            cuts.setdefault(tuple(len(group.buckets) for group in grouped), nbytes)
        return list(cuts.values())

    def group(self, nbytes: int) -> None:
        """Sends groups of up to `nbytes` from the next step on. Ranks of a ring must use the same size."""
        self._group_bytes = nbytes
        self._regroups = self.begun
        if not self.begun:
            self._regroup()

    def _regroup(self) -> None:
        self._regroups = False
        joined = self._communicator.joins
        self._groups = bucket_groups(self._buckets, self._group_bytes, joined=joined)

    def ready(self, bucket: Bucket) -> None:
        """Marks a bucket as complete, for `send_ready`."""
        self._ready.add(bucket.spec.index)

    def withdraw(self, bucket: Bucket) -> None:
        """Marks a bucket, which was not sent, as incomplete."""
        self._ready.discard(bucket.spec.index)

    def has_sent(self, bucket: Bucket) -> bool:
        """Whether the bucket was sent in this step."""
        return any(bucket in group.buckets for group in self._groups[: self._sent])

    def send_ready(self) -> None:
        """Sends the groups that are complete and next in order."""
        while not self.complete and self._is_ready(self._groups[self._sent]):
            self._send(self._groups[self._sent])

    def send_rest(self) -> None:
        """Sends the remaining buckets together, ready or not. A missing gradient counts as zeros.

        Raises:
            HubringError: An earlier step's exchange failed.
        """
        if self.complete:
            return
        self.settle_all()  # before together(), which holds messages back: no rank may wait meanwhile
        self._prepare()
        with self._communicator.together():
            while not self.complete:
                self._send(self._groups[self._sent])

    def look_for_writes(self) -> Look:
        """Starts to look whether the script has changed parameters since the last step that the hub took."""
        looks = [bucket.look_for_writes() for bucket in self._buckets if not self.has_left(bucket)]
        return lambda: any(look() for look in looks)

    def _prepare(self) -> None:
        """Prepares the first send of a step: parameters that the script has changed become the hub's."""
        if self.begun:
            return
        self.free_memory()
        if self._communicator.steps_on == "worker":
            return
        self.settle_all()
        for bucket in self._buckets:
            positions = bucket.take_written()
            if positions:
                self._communicator.write_parameters(bucket, positions)

    def reset(self) -> None:
        """Prepares for the next step. Waits for what a backward sent before it failed; raises as `finish`."""
        self._wait_for_all()
        self._ready.clear()
        self._sent = 0
        if self._regroups:
            self._regroup()

    # Waiting.

    def finish(self) -> None:
        """Sends the remaining buckets and waits for all. After an error, the next call waits again.

        Raises:
            DeadlineExceeded: The exchange took longer than the timeout.
            HubringError: The exchange failed.
        """
        self.send_rest()
        arrived = self._wait_for_all()
        if self._communicator.steps_on == "worker":
            for bucket, *_ in arrived:
                bucket.show_means()

    def _wait_for_all(self) -> list[InFlight]:
        """Waits for all buckets that were sent in this step, and returns them."""
        if self._under_way:
            self._begin_waiting()
            self._wait(self._under_way)
        arrived, self._under_way = self._under_way, []
        return arrived

    def free_memory(self) -> None:
        """Makes sure that the next gradients overwrite nothing that the script kept from an earlier step."""
        free = [bucket.free() for bucket in self._buckets if not self.has_left(bucket)]
        if not all(free):
            self.settle_all()
            move_gradients(self._buckets, self._communicator.allocate, adjacent=self._communicator.joins)
            self._communicator.gradients_moved(self._buckets)
            self._regroup()  # joined buckets have the earlier memory

    def leave(self, then: Callable[[Bucket], None]) -> None:
        """Sends the remaining buckets and waits for none. `then(bucket)` runs when a bucket is settled.

        If another optimizer's step has left these buckets, they are settled first, and `then` runs at once.
        """
        self.settle_all()
        self.send_rest()
        if not self._under_way:
            for bucket in reversed(self._buckets):
                then(bucket)
        self._left = {sent.bucket.spec.index: sent for sent in self._under_way}
        self._under_way = []
        self._then = then
        self._begin_waiting()

    def has_left(self, bucket: Bucket) -> bool:
        """Whether an earlier step's exchange of this bucket is not settled yet."""
        return bucket.spec.index in self._left

    def settle(self, bucket: Bucket) -> None:
        """Waits for a bucket that an earlier step left in flight. Repeated calls raise the same error.

        Raises:
            ConfigError: The script changed the gradients in place while they were in flight.
            HubringError: See `finish`.
        """
        sent = self._left.get(bucket.spec.index)
        if sent is None:
            return
        self._wait([sent])
        _check_untouched(sent)
        del self._left[bucket.spec.index]
        self._then(bucket)

    def settle_all(self) -> None:
        """Waits for all buckets that an earlier step left, front layers first. Raises as `settle`."""
        for bucket in reversed(self._buckets if self._left else ()):
            self.settle(bucket)

    def refresh(self) -> None:
        """Pulls the newest parameters without a push. Raises as `finish`."""
        self.settle_all()
        self._begin_waiting()
        pull = self._communicator.pull
        self._wait([InFlight(bucket, pull(bucket), bucket.changes) for bucket in self._buckets])

    def _is_ready(self, group: BucketGroup) -> bool:
        return all(bucket.spec.index in self._ready for bucket in group.buckets)

    def _send(self, group: BucketGroup) -> None:
        for bucket in group.buckets:
            self.settle(bucket)  # adds to `seconds` itself
        began = time.monotonic_ns()
        for bucket in group.buckets:
            bucket.seal(self._left_out(bucket), self.steps)
        self._sent += 1
        # Where workers step, the hub compares the steps; a ring compares the parity in Bucket.presence.
        step = {"step": float(self.steps)}
        works = [self._communicator.push_pull(load, self._hyper(load) or step) for load in group.loads]
        if self._recorder is not None:
            for load, work in zip(group.loads, works, strict=True):
                self._recorder.sent(load.spec.index, work, began)
        shared = works * len(group.buckets) if len(works) == 1 else works
        pairs = zip(group.buckets, shared, strict=True)
        self._under_way += [InFlight(bucket, work, bucket.changes) for bucket, work in pairs]
        ended = time.monotonic_ns()
        self.seconds += (ended - began) / 1e9
        if self._recorder is not None:
            self._recorder.waited(began, ended, "send")

    def _begin_waiting(self) -> None:
        """Sets one deadline for the whole step."""
        self._deadline = None if self.timeout is None else time.monotonic() + self.timeout

    def _wait(self, under_way: Iterable[InFlight]) -> None:
        """Waits for buckets. A bucket's copy to its device overlaps with the wait for the next bucket."""
        began = time.monotonic_ns()
        with self._communicator.waiting:
            for bucket, work, _ in under_way:
                now = time.monotonic()
                work.wait(None if self._deadline is None else max(0.0, self._deadline - now))
                bucket.stage.arrive()
                if self._communicator.steps_on == "server":
                    # A local step does the same: autograd then refuses values that it saved before the step.
                    bucket.show_values()
                    increment_version(bucket.parameters)
                else:
                    bucket.learn_absent()
        ended = time.monotonic_ns()
        self.seconds += (ended - began) / 1e9
        if self._recorder is not None:
            self._recorder.waited(began, ended)


def _check_untouched(sent: InFlight) -> None:
    """Raises ConfigError if gradients changed in flight: the push may contain the change in part."""
    if sent.bucket.changes != sent.changes:
        raise ConfigError(
            f"the gradients of {sent.bucket.spec.tensors[0].name} or its bucket were changed in place after"
            " step(), while cross_barrier=True has them in flight: zero them with optimizer.zero_grad(), or"
            " call optimizer.synchronize() before you change them"
        )


def _nothing(_: Bucket) -> None:
    """Does nothing: the hub has stepped."""

"""One step's exchange: every bucket is handed over once, in order, and waited for, now or later.

The law: groups are handed over in one order, on every rank, so that a ring
meets the same buckets everywhere in whatever order backward ends.

A step may also leave its exchange under way (`leave`). What it left is settled
bucket by bucket, when somebody needs one; until then its memory belongs to the
communicator, and nothing here touches it.
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
from hubring.workers.buckets.bucketing import Bucket
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.bucket_group import BucketGroup, bucket_groups
from hubring.workers.runtime.in_flight import FlightRecorder


class Handed(NamedTuple):
    """A bucket on its way; those of a joined group share one work."""

    bucket: Bucket
    work: Work
    changes: int
    """How often the script had changed its gradients by then."""


class Exchange:
    """Hands buckets over as early as the order allows.

    Attributes:
        seconds: What the exchange took of training so far: handing over, and waiting for what hid
            behind nothing.
    """

    def __init__(
        self,
        communicator: Communicator,
        buckets: list[Bucket],
        hyper: Callable[[Bucket], Hyper],
        timeout: float | None,
        recorder: FlightRecorder | None = None,
    ) -> None:
        self.seconds = 0.0
        self._recorder = recorder
        self._communicator = communicator
        self._buckets = buckets
        self._hyper = hyper
        self._timeout = timeout
        self._deadline: float | None = None
        self._ready = [False] * len(buckets)
        self._groups: list[BucketGroup] = []
        self._handed_over = 0
        self._under_way: list[Handed] = []
        self._left: dict[int, Handed] = {}
        self._zero_later: set[int] = set()
        self._then: Callable[[Bucket], None] = _nothing
        self.group(0)

    @property
    def begun(self) -> bool:
        """Whether some bucket of this step was handed over."""
        return self._handed_over > 0

    @property
    def complete(self) -> bool:
        """Whether every bucket of this step was handed over."""
        return self._handed_over == len(self._groups)

    @property
    def devices(self) -> set[torch.device]:
        """The CUDA devices that hold gradients."""
        return {bucket.gradients.device for bucket in self._buckets if bucket.gradients.is_cuda}

    # Handing over.

    def sizes(self, sizes: Iterable[int]) -> list[int]:
        """Those of `sizes` that make a difference; of alike ones the first."""
        cuts: dict[tuple[int, ...], int] = {}
        for nbytes in sizes:
            grouped = bucket_groups(self._buckets, nbytes, joined=False)
            cuts.setdefault(tuple(len(group.buckets) for group in grouped), nbytes)
        return list(cuts.values())

    def group(self, nbytes: int) -> None:
        """Hands over groups of up to `nbytes` from the next step on; ranks of a ring must do so alike."""
        assert not self.begun, "groups change between steps"
        self._groups = bucket_groups(self._buckets, nbytes, joined=self._communicator.joins)

    def ready(self, bucket: Bucket) -> None:
        """Notes that a bucket has all its gradients, and hands over what is next in order."""
        self._ready[bucket.spec.index] = True
        while not self.complete and self._is_ready(self._groups[self._handed_over]):
            self._hand_over(self._groups[self._handed_over])

    def hand_over_rest(self) -> None:
        """Hands over together what is left, ready or not: a missing gradient counts as zeros.

        Raises:
            HubringError: What an earlier step's exchange failed with.
        """
        if self.complete:
            return
        self.settle_all()  # waits, which nobody should who holds back what others wait for
        with self._communicator.together():
            while not self.complete:
                self._hand_over(self._groups[self._handed_over])

    def reset(self) -> None:
        """Begins the next step."""
        self._ready = [False] * len(self._buckets)
        self._handed_over = 0

    # Waiting.

    def finish(self) -> None:
        """Hands over what is left and waits for all of it.

        Raises:
            DeadlineExceeded: Not all was back in time.
            HubringError: What the exchange failed with.
        """
        self.hand_over_rest()
        under_way, self._under_way = self._under_way, []
        self._begin_waiting()
        self._wait(under_way)

    def leave(self, then: Callable[[Bucket], None]) -> None:
        """Hands over what is left and waits for none of it; `then(bucket)` runs when one is settled."""
        self.hand_over_rest()
        self._left = {handed.bucket.spec.index: handed for handed in self._under_way}
        self._under_way = []
        self._then = then
        self._begin_waiting()

    def has_left(self, bucket: Bucket) -> bool:
        """Whether an earlier step's exchange of this bucket is still to be settled."""
        return bucket.spec.index in self._left

    def settle(self, bucket: Bucket) -> None:
        """Waits for a bucket that an earlier step left, if it did; raises as `finish` does, each time.

        Raises:
            ConfigError: The script changed its gradients in place while they were on their way.
        """
        handed = self._left.get(bucket.spec.index)
        if handed is None:
            return
        self._wait([handed])
        _check_untouched(handed)
        del self._left[bucket.spec.index]
        self._then(bucket)
        if bucket.spec.index in self._zero_later:
            self._zero_later.discard(bucket.spec.index)
            bucket.zero_gradients()

    def settle_all(self) -> None:
        """Waits for all that an earlier step left, front layers first; raises as `finish` does."""
        for bucket in reversed(self._buckets if self._left else ()):
            self.settle(bucket)

    def zero_gradients(self, bucket: Bucket) -> None:
        """Zeroes a bucket's gradients: now, or once an earlier step's exchange is done with them."""
        if self.has_left(bucket):
            self._zero_later.add(bucket.spec.index)
        else:
            bucket.zero_gradients()

    def refresh(self) -> None:
        """Brings the newest parameters without giving a gradient; raises as `finish` does."""
        self.settle_all()
        self._begin_waiting()
        pull = self._communicator.pull
        self._wait([Handed(bucket, pull(bucket), bucket.changes) for bucket in self._buckets])

    def _is_ready(self, group: BucketGroup) -> bool:
        return all(self._ready[bucket.spec.index] for bucket in group.buckets)

    def _hand_over(self, group: BucketGroup) -> None:
        for bucket in group.buckets:
            self.settle(bucket)  # counts its own seconds
        began = time.monotonic_ns()
        for bucket in group.buckets:
            bucket.check_values()
            bucket.collect()
        self._handed_over += 1
        works = [self._communicator.push_pull(load, self._hyper(load)) for load in group.loads]
        if self._recorder is not None:
            for load, work in zip(group.loads, works, strict=True):
                self._recorder.handed(load.spec.index, work, began)
        shared = works * len(group.buckets) if len(works) == 1 else works
        pairs = zip(group.buckets, shared, strict=True)
        self._under_way += [Handed(bucket, work, bucket.changes) for bucket, work in pairs]
        ended = time.monotonic_ns()
        self.seconds += (ended - began) / 1e9
        if self._recorder is not None:
            self._recorder.waited(began, ended, "hand over")

    def _begin_waiting(self) -> None:
        """One deadline for the whole step."""
        self._deadline = None if self._timeout is None else time.monotonic() + self._timeout

    def _wait(self, under_way: Iterable[Handed]) -> None:
        """Waits for some; one's copy to its device runs while the next is waited for."""
        began = time.monotonic_ns()
        with self._communicator.waiting:
            for bucket, work, _ in under_way:
                now = time.monotonic()
                work.wait(None if self._deadline is None else max(0.0, self._deadline - now))
                bucket.stage.arrive()
                if self._communicator.steps_on == "server":
                    # As a step in this process would: autograd then refuses what it saved of them before.
                    increment_version(bucket.parameters)
        ended = time.monotonic_ns()
        self.seconds += (ended - began) / 1e9
        if self._recorder is not None:
            self._recorder.waited(began, ended)


def _check_untouched(handed: Handed) -> None:
    """What is pushed is read while it is sent: a change meanwhile is in none, some or all of it."""
    if handed.bucket.changes != handed.changes:
        raise ConfigError(
            f"the gradients of {handed.bucket.spec.tensors[0].name} or its neighbours were changed in place"
            " after step(), while cross_barrier=True has them on their way: zero them by"
            " optimizer.zero_grad(), or call optimizer.synchronize() before you touch them"
        )


def _nothing(_: Bucket) -> None:
    """What there is to do where the hub has stepped."""

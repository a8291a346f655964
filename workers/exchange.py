"""One step's exchange: every bucket is handed over once, in order, and waited for.

The law: bucket i is handed over after the buckets before it, on every rank, so
that a ring meets the same bucket everywhere in whatever order backward ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ps.types import Hyper
from ps.work import Work
from workers.bucketing import Bucket
from workers.communicator import Communicator


class Exchange:
    """Hands buckets over as early as the order allows.

    Attributes:
        seconds: Time spent waiting so far: the part of the exchange that hid behind nothing.
    """

    def __init__(
        self,
        communicator: Communicator,
        buckets: list[Bucket],
        hyper: Callable[[Bucket], Hyper],
        timeout: float | None,
    ) -> None:
        self.seconds = 0.0
        self._communicator = communicator
        self._buckets = buckets
        self._hyper = hyper
        self._timeout = timeout
        self._ready = [False] * len(buckets)
        self._handed_over = 0
        self._under_way: list[tuple[Bucket, Work]] = []

    @property
    def begun(self) -> bool:
        """Whether some bucket of this step was handed over."""
        return self._handed_over > 0

    @property
    def complete(self) -> bool:
        """Whether every bucket of this step was handed over."""
        return self._handed_over == len(self._buckets)

    def ready(self, bucket: Bucket) -> None:
        """Notes that a bucket has all its gradients, and hands over what is next in order."""
        self._ready[bucket.spec.index] = True
        while not self.complete and self._ready[self._handed_over]:
            self._hand_over(self._buckets[self._handed_over])

    def hand_over_rest(self) -> None:
        """Hands over what is left, ready or not: a missing gradient counts as zeros."""
        while not self.complete:
            self._hand_over(self._buckets[self._handed_over])

    def finish(self) -> None:
        """Hands over what is left and waits for all of it.

        Raises:
            DeadlineExceeded: Not all was back in time.
            HubringError: What the exchange failed with.
        """
        self.hand_over_rest()
        under_way, self._under_way = self._under_way, []
        self._wait(under_way)

    def refresh(self) -> None:
        """Brings the newest parameters without giving a gradient; raises as `finish` does."""
        for bucket in self._buckets:
            bucket.settle()  # the last upload may still read what the pull overwrites
        self._wait([(bucket, self._communicator.pull(bucket)) for bucket in self._buckets])

    def reset(self) -> None:
        """Begins the next step."""
        self._ready = [False] * len(self._buckets)
        self._handed_over = 0

    def _hand_over(self, bucket: Bucket) -> None:
        bucket.check_values()
        bucket.collect()
        self._handed_over += 1
        self._under_way.append((bucket, self._communicator.push_pull(bucket, self._hyper(bucket))))

    def _wait(self, under_way: list[tuple[Bucket, Work]]) -> None:
        """Waits with one deadline for all; a bucket's upload runs while the next is waited for."""
        began = time.monotonic()
        with self._communicator.waiting:
            for bucket, work in under_way:
                passed = time.monotonic() - began
                work.wait(None if self._timeout is None else max(0.0, self._timeout - passed))
                bucket.to_device(self._communicator.steps_on)
        self.seconds += time.monotonic() - began

"""One step's exchange: sends every bucket once, in order, and waits for it now or later.

Small buckets can leave early; large exchanges cost less per byte. Which matters more must be measured
(`hubring.workers.reducer.tuning`). So buckets are small, and are sent in groups of variable size.

Invariant: groups are sent in the same order on every rank, independent of the order in which backward
finishes buckets. A ring needs that.

A step can leave its exchange in flight (`leave`). Each such bucket is settled when it is needed. Until then
its memory belongs to the communicator and must not change.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import NamedTuple

from torch.autograd.graph import increment_version

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import StepHyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.bucketing import Kind, join, kind_of, move_gradients
from hubring.workers.buckets.value_memory import Look, nothing
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.slice_exchange import share
from hubring.workers.reducer.groups import ParameterGroups
from hubring.workers.runtime.training_record import FlightRecorder

OnSettled = Callable[[Bucket], None]


class BucketGroup(NamedTuple):
    """Buckets of one kind that are sent once all of them are ready.

    Attributes:
        buckets: At least one bucket, in order of index.
        loads: The buckets passed to the communicator: `buckets`, or one bucket that joins them.
        part: See `Exchange.add`.
    """

    buckets: tuple[Bucket, ...]
    loads: tuple[Bucket, ...]
    part: int = 0


def bucket_groups(
    buckets: Iterable[Bucket], nbytes: int, *, joined: bool, part: int = 0
) -> list[BucketGroup]:
    """Puts buckets into groups of at most `nbytes`, ordered by the index of their last bucket.

    Args:
        buckets: In order of index, which is the order of backward.
        nbytes: Maximum size of a group. A larger bucket forms its own group.
        joined: Exchange each group as one bucket. Its buckets must be adjacent in memory.
        part: See `Exchange.add`.
    """
    groups: list[list[Bucket]] = []
    newest: dict[Kind, list[Bucket]] = {}
    filled: Counter[Kind] = Counter()
    for bucket in buckets:
        kind, size = kind_of(bucket), bucket.gradients.nbytes
        if kind not in newest or filled[kind] + size > nbytes:
            newest[kind], filled[kind] = [], 0
            groups.append(newest[kind])
        newest[kind].append(bucket)
        filled[kind] += size
    groups.sort(key=lambda group: group[-1].spec.index)
    return [
        BucketGroup(tuple(group), (join(group),) if joined and len(group) > 1 else tuple(group), part)
        for group in groups
    ]


class _Sent(NamedTuple):
    """A bucket in flight. Buckets of a joined group share one work."""

    bucket: Bucket
    work: Work
    changes: int = 0
    """In-place changes of its gradients when the step left it."""


class Exchange:
    """Sends buckets as early as the order allows.

    Attributes:
        seconds: Seconds so far that training spent sending buckets and waiting for exchanges.
        steps: Completed steps.
        timeout: Seconds that one step's exchange may take; None: no limit.
        weight: What this rank's gradients count in the mean of the next exchange; None: 1.
        crosses: Whether a step may leave its exchange in flight.
        begun: Whether some bucket of this step was sent.
        complete: Whether every bucket of this step was sent.
        on_server: Whether the hub steps.
        groups: The groups of the newest optimizer of the parameters.
        parts: Buckets that were added together, by the number of the addition.
        buckets: All buckets, in the order of parts.
        hypers: What is sent with each bucket, by `read_hypers`; empty where workers step.
    """

    def __init__(
        self, communicator: Communicator, groups: ParameterGroups, recorder: FlightRecorder | None
    ) -> None:
        self.seconds = 0.0
        self.steps = 0
        self.timeout: float | None = None
        self.weight: float | None = None
        self._share = 1.0
        self.crosses = False
        self.on_server = communicator.steps_on == "server"
        self.groups = groups
        self.hypers: dict[Bucket, StepHyper] = {}
        self._recorder = recorder
        self._communicator = communicator
        self.parts: dict[int, list[Bucket]] = {}
        self.buckets: list[Bucket] = []
        self._deadline: float | None = None
        self._ready: set[Bucket] = set()
        self._group_bytes = 0
        self._groups: list[BucketGroup] = []
        self._count_sent(0)
        self._regroups = False
        self._under_way: list[_Sent] = []
        self._left: dict[Bucket, _Sent] = {}
        self._then: OnSettled = lambda _: None

    # What is sent, in which order.

    def add(self, buckets: list[Bucket], part: int) -> None:
        """Exchanges more buckets, which are adjacent in memory. They are sent in the order of parts."""
        self._set_parts({**self.parts, part: buckets})
        self._set_groups(self._groups[: self._sent], [*self._groups[self._sent :], *self._grouped(part)])

    def absorb(self, other: Exchange) -> None:
        """Exchanges the buckets of another exchange too. What it has sent stays sent."""
        self.settle_all()
        other.settle_all()
        self._set_parts(self.parts | other.parts)
        self._under_way += other._under_way
        self._ready |= other._ready
        self.seconds += other.seconds
        self.steps = max(self.steps, other.steps)
        self.weight = other.weight if self.weight is None else self.weight
        sent = self._groups[: self._sent] + other._groups[: other._sent]
        self._set_groups(sent, self._groups[self._sent :] + other._groups[other._sent :])

    def _set_parts(self, parts: dict[int, list[Bucket]]) -> None:
        self.parts = dict(sorted(parts.items()))
        self.buckets = [bucket for part in self.parts.values() for bucket in part]
        # With a stage, another thread goes on once it has read an answer.
        self._waits = all(bucket.stage is None for bucket in self.buckets)

    def _set_groups(self, sent: list[BucketGroup], rest: list[BucketGroup]) -> None:
        self._groups = sent + sorted(rest, key=attrgetter("part"))
        self._count_sent(len(sent))

    def _count_sent(self, sent: int) -> None:
        self._sent, self.begun, self.complete = sent, sent > 0, sent == len(self._groups)

    def _grouped(self, part: int) -> list[BucketGroup]:
        joined = self._communicator.joins
        return bucket_groups(self.parts[part], self._group_bytes, joined=joined, part=part)

    def group(self, nbytes: int) -> None:
        """Sends groups of up to `nbytes` from the next step on. Ranks of a ring must use the same size."""
        self._group_bytes = nbytes
        self._regroups = self.begun
        if not self.begun:
            self._regroup()

    def _regroup(self) -> None:
        self._regroups = False
        self._set_groups([], [group for part in self.parts for group in self._grouped(part)])

    # Sending.

    def read_hypers(self) -> dict[Bucket, StepHyper]:
        """Returns the hyperparameters that each bucket has now, where the hub steps."""
        hypers: dict[Bucket, StepHyper] = {}
        if self.on_server:
            for bucket in self.buckets:
                hypers[bucket] = self.groups.hyper(bucket)
        return hypers

    def ready(self, bucket: Bucket) -> None:
        """Marks a bucket as complete, for `send_ready`."""
        self._ready.add(bucket)

    def withdraw(self, bucket: Bucket) -> None:
        """Marks a bucket, which was not sent, as incomplete."""
        self._ready.discard(bucket)

    def has_sent(self, bucket: Bucket) -> bool:
        """Whether the bucket was sent in this step."""
        return any(bucket in group.buckets for group in self._groups[: self._sent])

    def send_ready(self) -> None:
        """Sends the groups that are complete and next in order."""
        while not self.complete and self._ready.issuperset(self._groups[self._sent].buckets):
            self._send(self._groups[self._sent])

    def send_rest(self) -> None:
        """Sends the remaining buckets together, ready or not. A missing gradient counts as zeros.

        Raises:
            HubringError: An earlier step's exchange failed.
        """
        if self.complete:
            return
        self.settle_all()  # before together(), which holds messages back: no rank may wait meanwhile
        self.hypers = self.read_hypers()
        self._prepare()
        with self._communicator.together():
            while not self.complete:
                self._send(self._groups[self._sent])

    def look_for_writes(self) -> Look:
        """Starts to look whether the script has changed what the hub has since the last step that it took."""
        if not self._left and self.groups.state_changed():
            return lambda: True
        looks = []
        for bucket in self.buckets:
            look = nothing if bucket in self._left else bucket.look_for_writes()
            if look is not nothing:
                looks.append(look)
        return (lambda: any(look() for look in looks)) if looks else nothing

    def _prepare(self) -> None:
        """Prepares the first send of a step: parameters that the script has changed become the hub's."""
        if self.begun:
            return
        self.free_memory()
        if not self.on_server:
            return
        self.settle_all()
        if self.groups.state_changed():
            self.groups.give_state()
        for bucket in self.buckets:
            positions = bucket.take_written()
            if positions and (hub := self._communicator.stepping_hub) is not None:
                hub.write_parameters(bucket, positions)

    def _send(self, group: BucketGroup) -> None:
        if self._left:
            for bucket in group.buckets:
                self.settle(bucket)  # adds to `seconds` itself
        began = time.monotonic_ns()
        for bucket in group.buckets:
            bucket.seal(self.groups.left_out(bucket) if self.on_server else frozenset(), self.steps)
            if self.weight is not None or bucket.weight is not None:
                self._weigh(bucket)
        self._count_sent(self._sent + 1)
        self._communicator.waits_soon = self.complete and self._waits and not self.crosses
        # Where workers step, the hub compares the steps; a ring compares the parity in Bucket.presence.
        step = {"step": float(self.steps)}
        for load in group.loads:
            work = self._communicator.push_pull(load, self.hypers[load] if self.on_server else step)
            if self._recorder is not None:
                self._recorder.sent(load.spec.index, work, began)
            for bucket in group.buckets if len(group.loads) == 1 else (load,):
                self._under_way.append(_Sent(bucket, work))
        ended = time.monotonic_ns()
        self.seconds += (ended - began) / 1e9
        if self._recorder is not None:
            self._recorder.waited(began, ended, "send")

    def _weigh(self, bucket: Bucket) -> None:
        bucket.weight = self.weight
        if self.weight is None or self._communicator.weighs:
            return
        if not self.begun:
            self._share = share(self._communicator, self.weight, "weight of gradients")
        bucket.gradients.data.mul_(self._share)  # no change by the script

    def skip(self) -> None:
        """Sends nothing in this step: the gradients are means already."""
        self._count_sent(len(self._groups))

    def reset(self) -> None:
        """Prepares for the next step. Waits for what a backward sent before it failed; raises as `finish`."""
        if self._under_way:
            self._wait_for_all()
        self._ready.clear()
        self._count_sent(0)
        if self._regroups:
            self._regroup()

    def free_memory(self) -> None:
        """Makes sure that the next gradients overwrite nothing that the script kept from an earlier step."""
        free = True
        for bucket in self.buckets:
            free &= bucket in self._left or bucket.shown.free()
        if not free:
            self.settle_all()
            for part in self.parts.values():
                move_gradients(part, self._communicator.allocate, adjacent=self._communicator.joins)
                self._communicator.gradients_moved(part)
            self._regroup()  # joined buckets have the earlier memory

    # Waiting.

    def finish(self) -> None:
        """Sends the remaining buckets and waits for all. After an error, the next call waits again.

        Raises:
            DeadlineExceeded: The exchange took longer than the timeout.
            HubringError: The exchange failed.
        """
        if not self.complete:
            self.send_rest()
        arrived = self._wait_for_all()
        if not self.on_server:
            for bucket, *_ in arrived:
                bucket.show_means()

    def _wait_for_all(self) -> list[_Sent]:
        """Waits for all buckets that were sent in this step, and returns them."""
        if self._under_way:
            self._begin_waiting()
            self._wait(self._under_way)
        arrived, self._under_way = self._under_way, []
        return arrived

    def leave(self, then: OnSettled) -> None:
        """Sends the remaining buckets and waits for none. `then(bucket)` runs when a bucket is settled.

        If another optimizer's step has left these buckets, they are settled first, and `then` runs at once.
        """
        self.settle_all()
        self.send_rest()
        if not self._under_way:
            for bucket in reversed(self.buckets):
                then(bucket)
        for bucket, work, _ in self._under_way:
            self._left[bucket] = _Sent(bucket, work, bucket.shown.state()[0])
        self._under_way = []
        self._then = then
        self._begin_waiting()

    def has_left(self, bucket: Bucket) -> bool:
        """Whether an earlier step's exchange of this bucket is not settled yet."""
        return bucket in self._left

    def settle(self, bucket: Bucket) -> None:
        """Waits for a bucket that an earlier step left in flight. Repeated calls raise the same error.

        Raises:
            ConfigError: The script changed the gradients in place while they were in flight.
            HubringError: See `finish`.
        """
        sent = self._left.get(bucket)
        if sent is None:
            return
        self._wait([sent])
        if bucket.shown.state()[0] != sent.changes:  # the push may contain the change in part
            raise ConfigError(
                f"the gradients of {bucket.spec.tensors[0].name} or its bucket were changed in place after"
                " step(), while cross_barrier=True has them in flight: zero them with"
                " optimizer.zero_grad(), or call optimizer.synchronize() before you change them"
            )
        del self._left[bucket]
        self._then(bucket)

    def settle_all(self) -> None:
        """Waits for all buckets that an earlier step left, front layers first. Raises as `settle`."""
        for bucket in reversed(self.buckets if self._left else ()):
            self.settle(bucket)

    def refresh(self) -> None:
        """Pulls the newest parameters without a push, where the hub steps. Raises as `finish`."""
        self.settle_all()
        if (hub := self._communicator.stepping_hub) is not None:
            self._begin_waiting()
            self._wait([_Sent(bucket, hub.pull(bucket)) for bucket in self.buckets])

    def _begin_waiting(self) -> None:
        """Sets one deadline for the whole step."""
        self._deadline = None if self.timeout is None else time.monotonic() + self.timeout

    def _wait(self, under_way: Iterable[_Sent]) -> None:
        """Waits for buckets. A bucket's copy to its device overlaps with the wait for the next bucket."""
        began = time.monotonic_ns()
        with self._communicator.waiting:
            for bucket, work, _ in under_way:
                work.wait(None if self._deadline is None else max(0.0, self._deadline - time.monotonic()))
                bucket.arrive()
                if self.on_server:
                    # A local step does the same: autograd then refuses values that it saved before the step.
                    increment_version(bucket.parameters)
                else:
                    bucket.learn_absent()
        ended = time.monotonic_ns()
        self.seconds += (ended - began) / 1e9
        if self._recorder is not None:
            self._recorder.waited(began, ended)

"""The exchange of one set of parameters' gradients, whichever optimizers step them.

A parameter's gradient is exchanged by the reducer that got it first. A later `DistributedOptimizer` over the
same parameters, instead of the first or beside it, steps with what that reducer exchanges. If it has
parameters of several reducers, they become one.

Where workers step, all ranks send the buckets in one order. Parameters that one rank's loss does not reach
take part with zeros, since the loss of another rank may reach them. So what is sent does not depend on what
backward does.

A turn is what one exchange gives to every optimizer of the set: it lasts until the next backward or
`zero_grad`, or until an optimizer steps for the second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import count
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch

from hubring.workers.buckets.bucket import Bucket
from hubring.workers.communicators.base import Communicator
from hubring.workers.reducer.backward import BackwardPasses
from hubring.workers.reducer.exchange import Exchange
from hubring.workers.reducer.forward import ForwardGuard
from hubring.workers.reducer.groups import ParameterGroups
from hubring.workers.reducer.overlap import Overlap
from hubring.workers.reducer.tuning import Tuner
from hubring.workers.runtime.training_record import FlightRecorder


class ReducerOptions(NamedTuple):
    """How the newest `DistributedOptimizer` of some parameters wants their gradients exchanged; see there.

    Attributes:
        groups: Its parameter groups.
        bucket_bytes: None: the first steps measure how many bytes to send together.
    """

    groups: ParameterGroups
    model: torch.nn.Module | None
    passes_per_step: int
    overlap: bool
    cross_barrier: bool
    timeout: float | None
    bucket_bytes: int | None
    recorder: FlightRecorder | None = None


class ReducerRegistry:
    """The reducers of one communicator, and what else its optimizers share. It keeps none alive.

    Attributes:
        communicator: The communicator.
        family: All registries of its hub: its own, and those of what averages beside it.
        numbers: Numbers the additions of buckets, equally on all ranks.
        reducers: The reducers.
        lock: Of all reducers' backward passes: a bucket may move to another reducer during a pass.
        growing: What takes in parameters that became trainable, by its `extend`, oldest optimizer first
            (`hubring.workers.optimizer.parameters`).
        states: What moves an optimizer's state to and from a hub, by the `id` of the optimizer, whose hooks
            keep it alive (`hubring.workers.optimizer.hub_optimizer`).
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        if communicator.registries is None:
            communicator.registries = []
        self.family: list[ReducerRegistry] = communicator.registries
        self.family.append(self)
        self.numbers = count()
        self.reducers: WeakSet[Reducer] = WeakSet()
        self.lock = RLock()
        self.growing: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        self.states: WeakValueDictionary[int, Any] = WeakValueDictionary()

    @classmethod
    def of(cls, communicator: Communicator) -> ReducerRegistry:
        """Returns a communicator's registry."""
        if communicator.registry is None:
            communicator.registry = cls(communicator)
        assert isinstance(communicator.registry, cls)
        return communicator.registry

    def exchanging(self, parameters: Iterable[torch.Tensor]) -> list[Reducer]:
        """Returns the reducers of some of these parameters, in the order in which all ranks made them."""
        wanted = set(parameters)
        found = [one for one in self.reducers if one.parameters & wanted]
        return sorted(found, key=lambda one: one.number)

    def extend(self) -> None:
        """Lets every optimizer take in parameters that became trainable, the newest first.

        A parameter is in several optimizers, and they may have several reducers. So all ranks do all of it
        when the first pass of any reducer begins: which one that is depends on what a rank's loss reaches.
        """
        for one in reversed(list(self.growing)):
            one.extend()


def unite(reducers: Sequence[Reducer]) -> Reducer:
    """Makes one reducer of some. Where a pass is open, it stays open, so that it ends once."""
    is_open = [one for one in reducers if one.passes.is_open]
    # The outermost of backwards inside each other ends last.
    whole = min(is_open, key=lambda one: one.passes.graph_task) if is_open else reducers[0]
    for other in reducers:
        if other is not whole:
            whole.absorb(other)
    return whole


class Reducer:
    """Exchanges the gradients of attached buckets.

    Args:
        communicator: Connects the ranks.
        buckets: The first buckets.
        options: How to exchange.

    Attributes:
        parameters: The parameters of all buckets.
        number: Orders the communicator's reducers.
        options: Those of the newest optimizer of the parameters, whose hyperparameters the hub uses.
        passes: Follows backward.
        overlap: Decides when gradients are exchanged.
        became: The reducer that has absorbed this one, which has no other attribute then.
    """

    overlap: Overlap
    became: Reducer | None = None

    def __init__(self, communicator: Communicator, buckets: list[Bucket], options: ReducerOptions) -> None:
        self.communicator = communicator
        self.on_server = communicator.steps_on == "server"
        self.options = options
        self.parameters: set[torch.nn.Parameter] = set()
        self.exchange = Exchange(communicator, options.groups, options.recorder)
        self.tuner: Tuner | None = None
        self._stepped: list[ParameterGroups] = []
        """Of the optimizers that have stepped in this turn."""
        self._registry = ReducerRegistry.of(communicator)
        lock = self._registry.lock
        self.passes = BackwardPasses(self.exchange, self._pass_begins, self._pass_has_begun, lock)
        self.number = self.add(buckets)
        self._follow(options)
        self._registry.reducers.add(self)

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, in the order in which they are sent."""
        return self.exchange.buckets

    # Which parameters, and for whom.

    def take_over(self, options: ReducerOptions) -> None:
        """Exchanges for a newer optimizer from now on, as it wants."""
        self.exchange.settle_all()
        self.overlap.remove_hooks()
        self._follow(options)

    def _follow(self, options: ReducerOptions) -> None:
        self.options = options
        self.passes.per_step = options.passes_per_step
        self.exchange.groups, self.exchange.timeout = options.groups, options.timeout
        self.exchange.crosses = options.cross_barrier
        here, wanted = self.communicator, options.overlap
        overlap = Overlap(here, self.exchange, self._guard(), wanted=wanted)
        self.overlap = self.passes.overlap = overlap
        self._grown = False
        """Whether there are buckets that `overlap` has not decided about."""

    def _guard(self) -> ForwardGuard | None:
        """Returns what makes forwards wait, with `cross_barrier`."""
        model = self.options.model if self.options.cross_barrier else None
        if model is None or not self.parameters.issubset(model.parameters()):
            return None  # parameters of an earlier optimizer's model, which nothing would make wait
        return ForwardGuard(model, tuple(self.buckets), self.exchange)

    def add(self, buckets: list[Bucket]) -> int:
        """Exchanges the gradients of attached buckets from now on; returns the number of this addition."""
        number = next(self._registry.numbers)
        self.exchange.add(buckets, number)
        self._include(buckets)
        self.passes.add(buckets)
        return number

    def added_with(self, parameters: Set[torch.Tensor]) -> list[Bucket]:
        """Returns the buckets that were added together with some of these parameters."""
        return [
            bucket
            for part in self.exchange.parts.values()
            if any(not parameters.isdisjoint(one.parameters) for one in part)
            for bucket in part
        ]

    def absorb(self, other: Reducer) -> None:
        """Exchanges the buckets of another reducer too, as the newest optimizer of both wants."""
        with self._registry.lock:
            other.overlap.remove_hooks()
            self._registry.reducers.discard(other)
            self._stepped += other._stepped
            self.number = min(self.number, other.number)
            self.exchange.absorb(other.exchange)
            self._include(other.buckets)
            self.passes.absorb(other.passes)
            if other.options.groups.number > self.options.groups.number:
                self.take_over(other.options)
            vars(other).clear()  # a use of it is an error
            other.became = self

    def give_up(self) -> None:
        """Exchanges nothing from now on, so that another reducer can."""
        self.overlap.remove_hooks()
        self._registry.reducers.discard(self)
        self.passes.give_up()

    def _include(self, buckets: list[Bucket]) -> None:
        self.parameters.update(parameter for bucket in buckets for parameter in bucket.parameters)
        self._grown = True
        if self.options.bucket_bytes is None:
            self.tuner = Tuner(self.communicator, self.exchange, self.options.timeout)

    # Turns.

    @property
    def awaits_step(self) -> bool:
        """Whether gradients were sent that no optimizer has stepped with."""
        return self.exchange.begun and not self._stepped

    def begin_turn(self) -> None:
        """Prepares for the next gradients. Raises as `Exchange.reset`, or `passes.refused`."""
        if self.passes.refused is not None:
            raise self.passes.refused
        self.exchange.reset()
        self.overlap.reset()
        self.passes.reset()
        self._stepped.clear()

    def drop_gradients(self, *, hold: bool) -> None:
        """Prepares for new gradients in the place of those that the script drops.

        Args:
            hold: Whether to move all gradients into the buckets, where the script may zero them in place.

        Raises:
            ConfigError: They were sent, and no step was taken with them.
        """
        if not self._stepped:
            self.overlap.check_droppable()
            if self.passes.count:
                self.overlap.note_dropped()
        self.begin_turn()
        if hold:
            self.exchange.settle_all()  # the gradients in flight must not change
            self.exchange.free_memory()
            for bucket in self.buckets:
                bucket.shown.collect()

    def _pass_begins(self) -> None:
        if self._stepped:
            self.begin_turn()
        if self.on_server:
            self.options.groups.look()
            self.exchange.hypers = self.exchange.read_hypers()  # for buckets that backward sends

    def _pass_has_begun(self) -> None:
        if not self.on_server or self.overlap.first_means is not None:
            self._registry.extend()  # so that the new gradients are means when backward returns

    # Steps.

    def begin_step(self, groups: ParameterGroups) -> None:
        """Prepares for an optimizer's step. One without a backward since its last exchanges again."""
        if self.passes.refused is not None:
            raise self.passes.refused
        if self._stepped and any(one is groups for one in self._stepped):
            self.begin_turn()

    @property
    def crosses(self) -> bool:
        """Whether `step()` may leave the exchange in flight."""
        return bool(self.overlap.crossing) and not self._grown

    def complete_passes(self) -> None:
        """Exchanges what fewer backward passes than a step needs have brought, where workers step."""
        if self.passes.count and not self.on_server and not self.exchange.begun:
            self.exchange.finish()

    def note_step(self, groups: ParameterGroups, steps: int) -> None:
        """Records that an optimizer has stepped.

        Args:
            groups: The optimizer's groups.
            steps: Its completed steps.
        """
        self._stepped.append(groups)
        self.exchange.steps = max(self.exchange.steps, steps)
        if self.overlap.crossing is None:
            self.overlap.begin_crossing(self.passes.count)
        # If step() sends everything at once, the group size makes no difference.
        if self.tuner is not None and self.overlap.backward and not self.tuner.note_step():
            self.tuner = None
        if self._grown:
            self._grown = False
            self.overlap.decide_anew(self._guard)

    def note_skip(self, groups: ParameterGroups) -> None:
        """Records that an optimizer has skipped its step."""
        self._stepped.append(groups)
        if self.tuner is not None:
            self.tuner.note_skip()

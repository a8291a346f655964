"""The reducers of one `DistributedOptimizer`: of its first parameters, and of those added later.

Reducers belong to their parameters (`hubring.workers.reducer.registry`). An optimizer owns them: it gives
the hyperparameters, and says how to exchange, until a newer optimizer of the same parameters does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import Hyper
from hubring.ps.optim.hyperparameters import hyper_of
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.bucketing import make_buckets
from hubring.workers.buckets.layout import NamedParameters
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.groups import Groups
from hubring.workers.optimizer.hub_optimizer_state import HubOptimizerState
from hubring.workers.optimizer.model_tensors import ModelTensors
from hubring.workers.optimizer.same_parameters import check_same_parameters, due
from hubring.workers.optimizer.setup import bytes_of_bucket
from hubring.workers.reducer.backward import BackwardPasses
from hubring.workers.reducer.exchange import Exchange
from hubring.workers.reducer.forward import ForwardGuard
from hubring.workers.reducer.reducer import Reducer, Wishes
from hubring.workers.reducer.reducer_set import ReducerSet
from hubring.workers.reducer.registry import registry_of


class Reducers:
    """Exchanges the gradients of an optimizer's parameters, also of those that become trainable later.

    Args:
        communicator: Connects the ranks.
        optimizer: The wrapped optimizer.
        model: Names the parameters.
        named: Names the parameters if they do not belong to one model.
        wishes: How to exchange.

    Attributes:
        inherited: Whether an earlier optimizer's reducers exchange some of the gradients.
        tensors: Names of the model's tensors.
        hub_state: Moves the optimizer's state, where the hub steps; else None.
    """

    def __init__(
        self,
        communicator: Communicator,
        optimizer: Optimizer,
        model: torch.nn.Module | None,
        named: NamedParameters | None,
        wishes: Wishes,
    ) -> None:
        self._communicator = communicator
        self._optimizer = optimizer
        self._model = model
        self._named = None if named is None else list(named)
        self._wishes = wishes
        self._on_server = communicator.steps_on == "server"
        self._groups = Groups(optimizer)
        self._seen_change = False
        self._registry = registry_of(communicator)
        self._all: list[Reducer] = []
        earlier = self._registry.of(self.held)
        self.inherited = bool(earlier)
        self._brings_state = any(not self._steps_already(one) for one in earlier)
        self.hub_state = self._hub_state()
        self._take_over(earlier)
        self.tensors = ModelTensors(model, self.buckets)

    def __iter__(self) -> Iterator[Reducer]:
        return iter(self._all)

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets."""
        return [bucket for reducer in self._all for bucket in reducer.buckets]

    @property
    def parameters(self) -> set[torch.nn.Parameter]:
        """All parameters whose gradients are exchanged."""
        return {parameter for reducer in self._all for parameter in reducer.parameters}

    @property
    def steps(self) -> int:
        """Steps that an earlier optimizer has completed with these parameters."""
        return max((reducer.steps for reducer in self._all), default=0)

    # Which parameters.

    def lay_out(self) -> list[Bucket]:
        """Makes buckets of the trainable parameters that no reducer has."""
        known = self.parameters
        self._groups.look()
        if known and not self._groups.unknown(known):
            return []
        here, wishes = self._communicator, self._wishes
        at_once = self._on_server and not wishes.overlap and not wishes.cross_barrier
        buckets = make_buckets(
            self._optimizer,
            self._named if self._model is None else self._model.named_parameters(),
            here.allocate,
            wishes.bucket_bytes or bytes_of_bucket(self.held, at_once=at_once),
            self._name_on_server() if self._on_server else "",
            here.allocate_values,
            adjacent=here.joins,
            presence=here.sums_presence,
            known=known,
            first_index=len(self.buckets),
        )
        self.tensors = ModelTensors(self._model, [*self.buckets, *buckets])
        return buckets

    def attach(self, buckets: list[Bucket]) -> int:
        """Gives all ranks rank 0's parameters; returns the completed steps to continue from."""
        if self.hub_state is not None:
            self.hub_state.follow(self)
            if self._brings_state:
                self.hub_state.send()
            self._brings_state = False
        if not buckets:
            return self.steps
        states = None if self.hub_state is None else self.hub_state.take(buckets)
        if not self._on_server:
            with torch.no_grad():
                for bucket in buckets:
                    bucket.copy_in()  # a checkpoint may have changed the parameters since
        with self._communicator.waiting:
            start = self._communicator.attach(buckets, states)
        if not self._on_server:
            with torch.no_grad():
                for bucket in buckets:
                    bucket.hand_out()
        return max(start.step, self.steps)

    def add(self, buckets: list[Bucket]) -> None:
        """Exchanges the gradients of attached buckets from now on."""
        if not buckets:
            return
        reducer = Reducer(self._communicator, buckets, self._wishes, self)
        self._registry.add(reducer)
        reducer.steps = self.steps
        self._include([reducer])

    def extend(self) -> None:
        """Takes in parameters that the script has thawed or added. All ranks do so in the same step.

        Raises:
            ConfigError: The ranks add different parameters, or an asynchronous hub steps.
        """
        changed = self._look()
        self._seen_change = False
        if not changed and not self._groups.thaws:
            return
        if not self._groups.unknown(self.parameters):
            return
        earlier = self.tensors
        try:
            self._take_over([one for one in self._registry.of(self.held) if one not in self._all])
            buckets = self.lay_out()
            self.attach(buckets)
        except BaseException:
            self.tensors = earlier
            raise
        self.add(buckets)

    def _look(self) -> bool:
        """Reads the groups; returns whether they have changed since the last `extend`."""
        self._seen_change |= self._groups.look()
        return self._seen_change

    def pass_began(self) -> None:
        """Extends during backward where workers step, so that the new gradients are means when it returns."""
        if self._on_server:
            self._look()  # backward may send buckets with the groups' hyperparameters
        else:
            self.extend()

    def _take_over(self, reducers: list[Reducer]) -> None:
        """Owns reducers that an earlier optimizer has made."""
        if self._on_server and reducers:
            self._check_kind(reducers)
        for reducer in reducers:
            reducer.take_over(self._wishes, self)
        self._include(reducers)

    def _include(self, reducers: list[Reducer]) -> None:
        self._all = sorted([*self._all, *reducers], key=lambda one: one.number)
        if reducers:
            self._registry.unite(self._all)
            self._set.passes.set_per_step(self._wishes.passes_per_step)

    def _steps_already(self, reducer: Reducer) -> bool:
        """Whether the same torch optimizer is the newest of the parameters, so that the hub has its state."""
        return isinstance(reducer.owner, Reducers) and reducer.owner._optimizer is self._optimizer

    def _hub_state(self) -> HubOptimizerState | None:
        """Returns what moves the optimizer's state, where the hub steps; each torch optimizer has one."""
        if not self._on_server:
            return None
        state = self._registry.states.get(id(self._optimizer))
        if state is None:
            state = HubOptimizerState(self._optimizer, self._communicator)
            self._registry.states[id(self._optimizer)] = state
        assert isinstance(state, HubOptimizerState)
        return state

    @property
    def _set(self) -> ReducerSet:
        return self._all[0].together

    @property
    def held(self) -> list[torch.nn.Parameter]:
        """All parameters of the optimizer."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def check_owner(self) -> None:
        """Checks that no later optimizer has taken over the parameters, of which the hub has one optimizer.

        Raises:
            ConfigError: One has.
        """
        if self._on_server and any(reducer.owner is not self for reducer in self._all):
            raise ConfigError(
                "a later DistributedOptimizer steps some of this optimizer's parameters, and the hub steps"
                " each parameter with one optimizer: use only the later one, or let the workers step with"
                " hubring.init(aggregate=True) or --aggregate"
            )

    def _check_kind(self, reducers: list[Reducer]) -> None:
        """Raises ConfigError if the hub steps the parameters with another kind of optimizer."""
        name = self._name_on_server()
        for bucket in [bucket for reducer in reducers for bucket in reducer.buckets]:
            if bucket.spec.optimizer != name:
                raise ConfigError(
                    f"the hub steps {bucket.spec.tensors[0].name} with {bucket.spec.optimizer}, and the"
                    f" script makes a {name} for it now: make all optimizers of one kind, or let the workers"
                    " step with hubring.init(aggregate=True) or --aggregate"
                )

    def _name_on_server(self) -> str:
        """Returns the name of the hub's optimizer; raises ConfigError if the hub cannot run it."""
        kind: type[Optimizer] = type(self._optimizer)
        name: str = kind.__name__
        for group in self._optimizer.param_groups:
            hyper_of(group, name)
        if getattr(torch.optim, name) is not kind:
            raise ConfigError(
                f"the hub can run torch.optim.{name}, but the script's optimizer is {kind.__module__}.{name}:"
                " start the workers with --aggregate; the hub then only averages, and the script's optimizer"
                " steps"
            )
        return name

    # Each step.

    def begin_turn(self) -> None:
        """Prepares for new gradients."""
        self._set.begin_turn(anyway=True)

    def drop_gradients(self) -> None:
        """Prepares for new gradients in the place of those that the script drops.

        Raises:
            ConfigError: They were sent, and no step was taken with them.
        """
        self._set.begin_turn()
        for reducer in self._all:
            reducer.overlap.check_droppable()
            if self.passes.count:
                reducer.watch.note_dropped()
        self.begin_turn()

    def hold_gradients(self) -> None:
        """Moves all gradients into the buckets, where the script may zero them in place."""
        self.settle()  # the gradients in flight must not change
        for reducer in self._all:
            reducer.exchange.free_memory()
        for bucket in self.buckets:
            bucket.collect()

    def begin_step(self) -> None:
        """Prepares for a step with what backward has brought.

        Raises:
            ConfigError: A later optimizer has taken over the parameters; the hub has one optimizer of each.
        """
        self.check_owner()
        self._set.begin_step(self)
        self.extend()

    def begin_at(self, steps: int) -> None:
        """Counts the steps from the completed ones, as the other members of a ring do."""
        for reducer in self._all:
            reducer.steps = max(reducer.steps, steps)

    def note_step(self, steps: int) -> None:
        """Records a completed step.

        Raises:
            ConfigError: Where each worker steps, two ranks' parameters differ.
        """
        self._set.note_step(self)
        for reducer in self._all:
            reducer.steps = max(reducer.steps, steps)
            # If step() sends everything at once, the group size makes no difference.
            if reducer.tuner is not None and reducer.overlap.backward:
                reducer.tuner.note_step()
        if not self._on_server and self._communicator.size > 1 and due(steps):
            self.settle()  # with cross_barrier
            check_same_parameters(self.tensors.trained(), self._communicator)

    def note_skip(self) -> None:
        """Records a step that was not taken."""
        self._set.note_step(self)
        for reducer in self._all:
            if reducer.tuner is not None:
                reducer.tuner.note_skip()

    def finish(self) -> None:
        """Sends what is left to send, and waits for everything. Raises as `Exchange.finish`."""
        self._set.finish()

    def complete_passes(self) -> None:
        """Exchanges what too few backward passes have brought, where workers step. Raises as `finish`."""
        self._set.complete_passes()

    @property
    def passes(self) -> BackwardPasses:
        """The backward passes of this step."""
        return self._set.passes

    def settle(self) -> None:
        """Waits for what an earlier step left in flight. Raises as `Exchange.finish`."""
        for reducer in self._all:
            reducer.exchange.settle_all()

    def hyper(self, bucket: Bucket) -> Hyper:
        """Returns the hyperparameters with which the hub steps a bucket."""
        if not self._on_server:
            return {}
        group = self._groups.of(bucket)
        return hyper_of(self._optimizer.defaults if group is None else group, bucket.spec.optimizer)

    def left_out(self, bucket: Bucket) -> frozenset[int]:
        """Returns the positions of a bucket's parameters that the hub does not step."""
        return self._groups.without(bucket) if self._on_server else frozenset()

    def guard(self, exchange: Exchange, buckets: list[Bucket]) -> ForwardGuard | None:
        if not self._wishes.cross_barrier or self._model is None:
            return None
        known = set(self._model.parameters())
        if any(one not in known for bucket in buckets for one in bucket.parameters):
            return None  # they belong to an earlier optimizer's model too, which nothing would make wait
        self._optimizer.register_state_dict_pre_hook(lambda _: exchange.settle_all())
        self._optimizer.register_load_state_dict_pre_hook(lambda *_: exchange.settle_all())
        return ForwardGuard(self._model, buckets, exchange)

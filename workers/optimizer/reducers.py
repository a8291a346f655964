"""The reducers of one `DistributedOptimizer`: of its first parameters, and of those added later."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakMethod

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
from hubring.workers.reducer.exchange import Exchange
from hubring.workers.reducer.forward import ForwardGuard
from hubring.workers.reducer.reducer import Reducer, Wishes, reducers_of


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
        hub_state: Moves the optimizer's state, where the hub steps.
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
        self._attached = False
        self._all = reducers_of(communicator, self._held)
        self.inherited = bool(self._all)
        if self.inherited and self._on_server:
            self._check_kind()
        for reducer in self._all:
            reducer.passes.set_per_step(wishes.passes_per_step)
            reducer.owner = self
        self.tensors = ModelTensors(model, self.buckets)
        self.hub_state = HubOptimizerState(optimizer, communicator, lambda: self.buckets, self.settle)
        if self._on_server:
            self.hub_state.follow()

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
            wishes.bucket_bytes or bytes_of_bucket(self._held, at_once=at_once),
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
        if self._on_server and self.inherited and not self._attached:
            self._communicator.write_state(self.buckets, self.hub_state.take(self.buckets))
        self._attached = True
        if not buckets:
            return self.steps
        states = self.hub_state.take(buckets) if self._on_server else None
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

    def add(self, buckets: list[Bucket]) -> Reducer | None:
        """Exchanges the gradients of attached buckets from now on."""
        if not buckets:
            return None
        reducer = Reducer(self._communicator, buckets, self._wishes, self, self._guard)
        # Weak, because the hooks on the parameters reach the passes.
        begin = WeakMethod(self._extend_in_pass)

        def on_begin() -> None:
            extend = begin()
            if extend is not None:
                extend()

        reducer.passes.on_begin = on_begin
        reducer.steps = self.steps
        self._all.append(reducer)
        return reducer

    def extend(self) -> Reducer | None:
        """Takes in parameters that the script has thawed or added. All ranks do so in the same step.

        Raises:
            ConfigError: The ranks add different parameters, or an asynchronous hub steps.
        """
        changed = self._look()
        self._seen_change = False
        if not changed and not self._groups.thaws:
            return None
        if not self._groups.unknown(self.parameters):
            return None
        buckets = self.lay_out()
        self.attach(buckets)
        return self.add(buckets)

    def _look(self) -> bool:
        """Reads the groups; returns whether they have changed since the last `extend`."""
        self._seen_change |= self._groups.look()
        return self._seen_change

    def _extend_in_pass(self) -> None:
        """Extends during backward where workers step, so that the new gradients are means when it returns."""
        if self._on_server:
            self._look()  # backward may send buckets with the groups' hyperparameters
            return
        reducer = self.extend()
        if reducer is not None:
            reducer.passes.enter()

    @property
    def _held(self) -> list[torch.nn.Parameter]:
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

    def _check_kind(self) -> None:
        """Raises ConfigError if the hub steps the parameters with another kind of optimizer."""
        name = self._name_on_server()
        for bucket in self.buckets:
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

    def begin_step(self) -> None:
        """Prepares for the next step's gradients."""
        for reducer in self._all:
            reducer.begin_step()

    def note_step(self, steps: int) -> None:
        """Records a completed step, and prepares for the next one.

        Raises:
            ConfigError: Where each worker steps, two ranks' parameters differ.
        """
        self.begin_step()
        for reducer in self._all:
            reducer.steps = max(reducer.steps, steps)
            # If step() sends everything at once, the group size makes no difference.
            if reducer.tuner is not None and reducer.overlap.backward:
                reducer.tuner.note_step()
        if not self._on_server and self._communicator.size > 1 and due(steps):
            self.settle()  # with cross_barrier
            check_same_parameters(self.tensors.trained(), self._communicator)

    def note_skip(self) -> None:
        """Records a step that was not taken, and prepares for the next one."""
        self.begin_step()
        for reducer in self._all:
            if reducer.tuner is not None:
                reducer.tuner.note_skip()

    def finish(self) -> None:
        """Sends what is left to send, and waits for everything. Raises as `Exchange.finish`."""
        for reducer in self._all:
            reducer.overlap.check()
            reducer.exchange.finish()

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

    def _guard(self, exchange: Exchange, buckets: list[Bucket]) -> ForwardGuard | None:
        if not self._wishes.cross_barrier or self._model is None:
            return None
        self._optimizer.register_state_dict_pre_hook(lambda _: exchange.settle_all())
        self._optimizer.register_load_state_dict_pre_hook(lambda *_: exchange.settle_all())
        return ForwardGuard(self._model, buckets, exchange)

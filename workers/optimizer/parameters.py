"""The parameters that one `DistributedOptimizer` trains: those of its construction, and those added later.

Their gradients are exchanged by a reducer, which belongs to the parameters
(`hubring.workers.reducer.reducer`). An optimizer gives the hyperparameters and the exchange options, until a
newer optimizer of the same parameters does.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hubring.ps.core.errors import ConfigError, HubCannotStep
from hubring.ps.core.torch_internals import no_dense_tensor, unsaved_buffers
from hubring.ps.optim.hyperparameters import hyper_of
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.bucketing import NamedParameters, make_buckets
from hubring.workers.buckets.value_memory import nothing
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.hub_optimizer import HubOptimizerState
from hubring.workers.optimizer.model_checks import check_fused
from hubring.workers.reducer.groups import parameters_of
from hubring.workers.reducer.reducer import Reducer, ReducerOptions, ReducerRegistry, unite

log = logging.getLogger(__name__)


BUCKET_BYTES = 4 << 20
"""Default maximum size of a bucket: one slice of the hub. Tuning groups buckets."""

GPU_BUCKET_BYTES = 32 << 20
"""The same for parameters on a GPU. Measured for 100 MiB from two workers on one H100: buckets of 4, 32 and
128 MiB take 43, 8.0 and 4.1 ms to a hub on the GPU, and 57, 39 and 41 ms through host memory."""

UNBOUNDED = sys.maxsize
"""No maximum size: one bucket per dtype and device, so the fewest messages."""


class TrainedParameters:
    """Gives an optimizer's parameters a reducer, also those that become trainable later.

    Args:
        communicator: Connects the ranks.
        optimizer: The wrapped optimizer.
        named: The parameters' names if they do not belong to one model.
        options: How to exchange.

    Attributes:
        communicator: See above.
        groups: The optimizer's groups.
        timeout: Seconds that one step's exchange may take; None: no limit.
        buckets: The buckets of the parameters, and those that were added together with one of them.
        inherited: Whether an earlier optimizer's reducers exchange some of the gradients.
    """

    def __init__(
        self,
        communicator: Communicator,
        optimizer: Optimizer,
        named: NamedParameters | None,
        options: ReducerOptions,
    ) -> None:
        self.groups, self.timeout = options.groups, options.timeout
        self.communicator = communicator
        self._optimizer = optimizer
        self._named = None if named is None else list(named)
        self._options = options
        self._on_server = communicator.steps_on == "server"
        if not self._on_server:
            check_fused(optimizer)
        self._registry = ReducerRegistry.of(communicator)
        self._reducer: Reducer | None = None
        if options.cross_barrier:
            optimizer.register_state_dict_pre_hook(lambda _: self.settle())
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.settle())
        earlier = self._registry.exchanging(self.held)
        self.inherited = bool(earlier)
        self._state = self._hub_state()
        # The hub has the state if it steps for the same torch optimizer already.
        self._brings_state = any(one.options.groups.optimizer is not optimizer for one in earlier)
        self.buckets: list[Bucket] = []
        self._coming: list[Bucket] = []
        """Buckets that are laid out and not exchanged yet."""
        self._first = {one for one in self.held if one.requires_grad}
        self._unite(earlier)
        if earlier:
            self.reducer.take_over(options)

    @property
    def reducer(self) -> Reducer:
        """What exchanges the gradients."""
        reducer = self._reducer
        assert reducer is not None
        while reducer.became is not None:
            self._reducer = reducer = reducer.became
        return reducer

    @property
    def held(self) -> list[torch.nn.Parameter]:
        """All parameters of the optimizer."""
        return parameters_of(self._optimizer)

    def all_exchanged(self) -> set[torch.Tensor]:
        """Returns the parameters of all optimizers."""
        reducers = [one for registry in self._registry.family for one in registry.reducers]
        return set().union(*(one.parameters for one in reducers))

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Returns all exchanged parameters by name."""
        every = (*self.buckets, *self._coming)
        return {name: one for bucket in every for name, one in bucket.named_parameters}

    def rest(self) -> list[tuple[str, torch.Tensor]]:
        """Returns the model's buffers and frozen parameters, which are not exchanged.

        Those that are neither dense nor sparse are left out: they stay what each rank has.
        """
        return [(name, one) for name, one in self._untrained() if not _is_odd(one)]

    def name_odd(self) -> None:
        """Logs which tensors with values are not copied from rank 0."""
        odd = [name for name, one in self._untrained() if _is_odd(one) and not (is_lazy(one) or one.is_meta)]
        if odd and self.communicator.size > 1 and self.communicator.rank == 0:
            log.warning(
                "%s: quantized, nested or wrapping other tensors, so not copied from rank 0; make them alike"
                " on all ranks",
                ", ".join(odd[:8]) + (", ..." if len(odd) > 8 else ""),
            )

    def _untrained(self) -> list[tuple[str, torch.Tensor]]:
        model = self._options.model
        if model is None:
            return []
        exchanged = set(self.trained().values())
        frozen = [(name, one) for name, one in model.named_parameters() if one not in exchanged]
        return [*model.named_buffers(), *frozen]

    def frozen(self) -> dict[str, torch.Tensor]:
        """Returns the model's parameters that were frozen at the start, as when the script restarts."""
        model = self._options.model
        every = {} if model is None else dict(model.named_parameters())
        return {name: one for name, one in every.items() if one not in self._first and not _is_odd(one)}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns what `rest` has of the buffers in the model's `state_dict`."""
        model = self._options.model
        if model is None:
            return {}
        unsaved = {
            f"{prefix}.{name}".lstrip(".")
            for prefix, module in model.named_modules(remove_duplicate=False)
            for name in unsaved_buffers(module)
        }
        return {
            name: one
            for name, one in self.rest()
            if name not in unsaved and not isinstance(one, torch.nn.Parameter)
        }

    def settle(self) -> None:
        """Waits until all parameters are updated. Raises as `Exchange.finish`."""
        if self._reducer is not None:
            self.reducer.exchange.settle_all()

    # Which parameters.

    def lay_out(self) -> list[Bucket]:
        """Makes buckets of the trainable parameters that no reducer has. They are this optimizer's too."""
        known = set() if self._reducer is None else self.reducer.parameters
        self.groups.look()
        if known and not self.groups.unknown(known):
            return []
        here, options = self.communicator, self._options
        at_once = self._on_server and not options.overlap and not options.cross_barrier
        buckets = make_buckets(
            self._optimizer,
            self._named if options.model is None else options.model.named_parameters(),
            here.allocate,
            options.bucket_bytes or bytes_of_bucket(self.held, at_once=at_once),
            self._name_on_server() if self._on_server else "",
            here.allocate_values,
            adjacent=here.joins,
            presence=here.sums_presence,
            known=known,
            first_index=len(self.buckets),
        )
        self._coming = buckets
        return buckets

    def attach(self, buckets: list[Bucket]) -> int:
        """Gives all ranks rank 0's parameters; returns the completed steps to continue from."""
        if self._state is not None:
            self._state.follow(self._reached)
            if self._brings_state or (self.buckets and self._state.changed()):
                self._state.send()
            self._brings_state = False
        steps = 0 if self._reducer is None else self.reducer.exchange.steps
        if not buckets:
            return steps
        states = None if self._state is None else self._state.take(buckets)
        if not self._on_server:
            with torch.no_grad():
                for bucket in buckets:
                    bucket.copy_in()  # a checkpoint may have changed the parameters since
        thawed = [named for bucket in buckets for named in bucket.named_parameters] if self.buckets else []
        used = [parameter.detach().clone() for _, parameter in thawed]
        with self.communicator.waiting:
            start = self.communicator.attach(buckets, states)
        for (name, parameter), then in zip(thawed, used, strict=True):
            if self._on_server and not torch.equal(parameter.detach(), then):
                log.warning(
                    "this step's gradients were computed with other values of %s than the hub has: it was"
                    " trained before the job restarted, and the script has just thawed it",
                    name,
                )
        if self._state is not None:
            self._state.show([*self.buckets, *buckets])
        if not self._on_server:
            with torch.no_grad():
                for bucket in buckets:
                    bucket.hand_out()
        return max(start, steps)

    def begin(self, buckets: list[Bucket], steps: int) -> None:
        """Exchanges the gradients of all parameters, of attached buckets and of earlier ones, from now on."""
        self.add(buckets)
        if self.inherited and buckets:
            self.reducer.take_over(self._options)  # for all of them
        if self.communicator.members is not None:  # the other members count from here
            self.reducer.exchange.steps = max(self.reducer.exchange.steps, steps)

    def add(self, buckets: list[Bucket]) -> None:
        """Exchanges the gradients of attached buckets from now on. Backward looks for more parameters."""
        self._coming = []
        self.groups.note_known()
        self._registry.growing[self] = None
        if not buckets:
            return
        self.buckets += buckets
        if self._reducer is not None:
            self.reducer.add(buckets)
            return
        self._reducer = Reducer(self.communicator, buckets, self._options)

    def extend(self) -> bool:
        """Takes in parameters that the script has thawed or added. All ranks do so in the same step.

        Returns:
            Whether there were any. The reducer may be another one then.

        Raises:
            ConfigError: The ranks add different parameters, or an asynchronous hub steps.
        """
        self.groups.look()
        if not self.groups.grows:
            return False
        if not self.groups.unknown(set(self.trained().values())):
            self.groups.note_known()
            return False
        try:
            self._unite([self.reducer, *self._registry.exchanging(self.held)])
            buckets = self.lay_out()
            self.attach(buckets)
        except BaseException:
            self._coming = []
            raise
        self.add(buckets)
        return True

    def _unite(self, reducers: list[Reducer]) -> None:
        """Exchanges with reducers that earlier optimizers have made, which become one."""
        held = set(self.held)
        if self._on_server:
            self._check_kind([bucket for one in reducers for bucket in one.added_with(held)])
        if reducers:
            self._reducer = unite(list(dict.fromkeys(reducers)))
            own = [*self.buckets, *self._reducer.added_with(held)]
            self.buckets = list(dict.fromkeys(own))

    def _hub_state(self) -> HubOptimizerState | None:
        """Returns what moves the optimizer's state, where the hub steps; each torch optimizer has one."""
        hub = self.communicator.stepping_hub
        if hub is None:
            self.groups.state_changed = self.groups.give_state = nothing
            return None
        state = self._registry.states.get(id(self._optimizer))
        if state is None:
            state = HubOptimizerState(self._optimizer, hub)
            self._registry.states[id(self._optimizer)] = state
        assert isinstance(state, HubOptimizerState)
        self.groups.state_changed, self.groups.give_state = state.changed, state.send
        return state

    def give_up(self) -> None:
        """Makes room for another exchange of the same parameters. No step was taken."""
        self.reducer.give_up()
        self._registry.growing.pop(self, None)
        if self._state is not None:
            self._state.give_up()
            self._registry.states.pop(id(self._optimizer), None)

    def _reached(self) -> list[Bucket]:
        """Returns the buckets, once no step of them is under way. Raises as `checked_reducer`."""
        self.checked_reducer().exchange.settle_all()
        return self.buckets

    def checked_reducer(self) -> Reducer:
        """Returns the reducer if no later optimizer has taken over the parameters: the hub has one of each.

        Raises:
            ConfigError: One has.
        """
        reducer = self.reducer
        if self._on_server and reducer.options.groups is not self.groups:
            raise ConfigError(
                "a later DistributedOptimizer steps some of this optimizer's parameters, and the hub steps"
                " each parameter with one optimizer: use only the later one, or let the workers step with"
                " hubring.init(aggregate=True) or --aggregate"
            )
        return reducer

    def _check_kind(self, buckets: list[Bucket]) -> None:
        """Raises ConfigError if the hub steps the parameters with another kind of optimizer."""
        name = self._name_on_server() if buckets else ""
        for bucket in buckets:
            if bucket.spec.optimizer != name:
                raise ConfigError(
                    f"the hub steps {bucket.spec.tensors[0].name} with {bucket.spec.optimizer}, and the"
                    f" script makes a {name} for it now: make all optimizers of one kind, or let the workers"
                    " step with hubring.init(aggregate=True) or --aggregate"
                )

    def _name_on_server(self) -> str:
        """Returns the name of the hub's optimizer; raises HubCannotStep if the hub cannot run it."""
        kind: type[Optimizer] = type(self._optimizer)
        name: str = kind.__name__
        for group in self._optimizer.param_groups:
            hyper_of(group, name)
        if getattr(torch.optim, name) is not kind:
            raise HubCannotStep(
                f"the hub can run torch.optim.{name}, but the script's optimizer is {kind.__module__}.{name}"
            )
        return name


def lay_out(
    communicator: Communicator, optimizer: Optimizer, named: NamedParameters | None, options: ReducerOptions
) -> tuple[TrainedParameters, list[Bucket]]:
    """Returns an optimizer's parameters and the buckets to attach, for a hub that steps or for means.

    Raises:
        ConfigError: An asynchronous hub cannot step as the optimizer, or the hub steps some parameters for an
            earlier optimizer already, and cannot for this one.
    """
    held = parameters_of(optimizer)
    earlier = [one for one in ReducerRegistry.of(communicator).family if one.exchanging(held)]
    if len(earlier) > 1:
        raise ConfigError(
            "the hub steps some of these parameters, and the workers step others, for earlier"
            " DistributedOptimizers: let the workers step all, with hubring.init(aggregate=True) or"
            " --aggregate"
        )
    if earlier:
        communicator = earlier[0].communicator
    hub = communicator.stepping_hub
    inherits = hub is not None and bool(earlier)
    if hub is not None and hub.has_model and not inherits:
        for one in ReducerRegistry.of(communicator).reducers:
            one.overlap.backward = False  # the other optimizer's loss may reach its parameters, as in a GAN
        communicator = communicator.averaging("the hub steps for another DistributedOptimizer of this script")
    try:
        trained = TrainedParameters(communicator, optimizer, named, options)
        return trained, trained.lay_out()
    except HubCannotStep as why:
        if inherits:
            raise
        return lay_out(communicator.averaging(str(why)), optimizer, named, options)


def _is_odd(tensor: torch.Tensor) -> bool:
    kind = no_dense_tensor(tensor)
    return bool(kind) and not kind.startswith("sparse")


def bytes_of_bucket(parameters: Iterable[torch.Tensor], *, at_once: bool) -> int:
    """Returns the maximum size of a bucket if no setting gives one.

    Buckets that are sent at once and awaited together gain nothing from a limit: slices pipeline on
    their own.
    """
    if at_once:
        return UNBOUNDED
    on_gpu = any(parameter.device.type != "cpu" for parameter in parameters)
    return GPU_BUCKET_BYTES if on_gpu else BUCKET_BYTES

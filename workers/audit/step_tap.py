"""Records the steps of one optimizer, from outside of the code that exchanges and steps.

    own       what backward adds to a parameter's gradient, after the tensor's hooks, and what was there
              before; without backward, what the script sets
    arrived   the gradient when backward has returned: where workers step, the mean
    given     the gradient that `step()` gets, which the script may have clipped
    before    the parameters when the step's first gradient is made; where workers step, or no gradient was
              made, when `step()` begins
    after     the parameters when the step is completed

A rank that holds a part of a parameter, as with FSDP, records what it holds of all but `own`.

Hooks only read, so training is the same bit by bit. Elements leave the parameters' device once a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Module
from torch.optim import Optimizer

from hubring.ps.optim.hyperparameters import as_number
from hubring.workers.audit.audit_file import AuditStep, ModelLayout
from hubring.workers.audit.elements import AFTER, ARRIVED, BEFORE, GIVEN, OWN, StepElements
from hubring.workers.audit.rotating_elements import OtherElements, is_due
from hubring.workers.audit.sample import TappedParameter, counted, sample, shard
from hubring.workers.audit.samples import SampleTap
from hubring.workers.audit.unmoved_elements import StillElements
from hubring.workers.communicators.base import Communicator

BATCH_NORM = "BatchNorm"
"""The fact that a model has layers that depend on the other samples of a rank's batch."""

Write = Callable[[ModelLayout | AuditStep], None]


@runtime_checkable
class Tapped(Protocol):
    """What a tap needs from an optimizer that wraps the script's own, besides torch's interface."""

    @property
    def named_parameters(self) -> dict[str, Tensor]:
        """All trained parameters by name."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer."""

    @property
    def completed_steps(self) -> int:
        """Completed steps."""

    @property
    def had_state(self) -> bool:
        """Whether the optimizer had taken steps before it was wrapped."""

    @property
    def ahead(self) -> int:
        """1 if `step()` does not wait for the exchange, else 0."""


class StepTap:
    """Records the steps of one optimizer.

    Args:
        number: Number of the optimizer in its process.
        trainer: The optimizer.
        communicator: Connects the ranks.
        write: Takes layouts and steps.

    Attributes:
        seconds: What recording has cost so far, without torch's time to call the hooks and without samples.
        samples: Records the samples; None: the model is not known.
    """

    def __init__(self, number: int, trainer: Tapped, communicator: Communicator, write: Write) -> None:
        self.trainer = trainer
        self.steps = trainer.completed_steps
        self.seconds = 0.0
        self._number = number
        self._communicator: Communicator = getattr(trainer, "communicator", communicator)
        self._on_worker = self._communicator.steps_on == "worker"
        self._write = write
        self._optimizer = cast("Any", trainer)
        self._wrapped: Any = getattr(trainer, "wrapped", trainer)
        hub = communicator.stepping_hub
        self._record = None if hub is None else hub.record_pushes()
        self._fixed = StepElements()
        self._others: OtherElements | None = None
        self._fresh = not trainer.had_state
        self._last_after = b""
        self._left: OtherElements | None = None
        """The other elements of the last step."""
        self._known = set[int]()
        self._opened = self._moved = False
        self._graph_task = -1
        self._options: list[dict[str, Any]] = []
        self._states = 0
        """Parameters with a state in the optimizer, after the last step."""
        model: Module | None = getattr(trainer, "model", None)
        script = isinstance(model, torch.jit.ScriptModule)  # it takes no hooks
        self.samples = None if model is None or script else SampleTap(model)
        self._still, self._steps_now = StillElements(), False
        self._layout()
        self._begin()
        self._handles = [
            self._optimizer.register_step_pre_hook(self._step_begins),
            self._optimizer.register_step_post_hook(self._step_ended),
            self._optimizer.register_load_state_dict_post_hook(self._state_loaded),
        ]

    def close(self) -> None:
        """Records no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.samples is not None:
            self.samples.close()

    # What a step does, in order.

    def _hook(self, position: int) -> Callable[[tuple[Tensor | None, ...]], None]:
        alive = weakref.ref(self)  # the garbage collector cannot see torch's hooks

        def made(gradients: tuple[Tensor | None, ...]) -> None:
            tap, (gradient, *_) = alive(), gradients
            if tap is not None and tap._handles and gradient is not None:
                tap._gradient_made(position, gradient)

        return made

    @counted
    def _gradient_made(self, position: int, gradient: Tensor) -> None:
        self._open()
        if BEFORE not in self._known:
            self._take_before()
            if not self._on_worker:  # the answer of a hub can come before the step begins
                self._still.look(self._fixed.parameters)
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._graph_task = task
            # What is queued during the pass runs before what is queued at its end.
            Variable._execution_engine.queue_callback(
                lambda: Variable._execution_engine.queue_callback(self._pass_ended)
            )
        for each in self._recorded:
            each.gradient_made(position, gradient)

    @counted
    def _pass_ended(self) -> None:
        # Not means that are still in flight, or that a hub that steps shows once.
        in_flight = self._on_worker and self.trainer.ahead
        self._known.discard(ARRIVED)
        if not (in_flight or getattr(self.trainer, "shows_means", False)):
            self._known.add(ARRIVED)
            self._take_gradients(ARRIVED)

    @counted
    def _step_begins(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wrapped = self._wrapped
        replaced = vars(wrapped).get("step")
        plain = replaced is None or hasattr(replaced, "_wrapped_by_lr_sched")
        hooked = bool(wrapped._optimizer_step_pre_hooks) or not plain
        closure = any(each is not None for each in (*args[1:], *kwargs.values()))  # args begin with self
        self._script_inside = closure or hooked
        scale = getattr(self._optimizer, "grad_scale", None)
        self._divisor = 1.0 if scale is None else float(scale)
        cleared = getattr(wrapped.state, "seen", False) or dict.__len__(wrapped.state) < self._states
        self._fresh = self._fresh and not cleared
        if cleared or self._grouped != self._groups() or self._hooked != self._is_hooked():
            self._layout()
        self._open()
        if self._on_worker and not any(self._fixed.owns):  # set by the script, and exchanged within step()
            self._take_gradients(OWN)
        elif not (self._on_worker and self.trainer.ahead):
            self._known.add(GIVEN)
            self._take_gradients(GIVEN)
        if self._on_worker or BEFORE not in self._known:
            self._still.look(self._fixed.parameters)
            if not self.trainer.ahead:
                self._take_before()
        self._steps_now = True
        if not self._script_inside:  # else the step can make other gradients
            self._still.judge(self.trainer.param_groups, self._divisor)

    @counted
    def step_completed(self) -> None:
        """Records the step that was just completed."""
        self.steps = self.trainer.completed_steps
        if not self.trainer.ahead:  # else the parameters are still to be stepped
            self._known.add(AFTER)
            self._take_parameters(AFTER)
        options = [_options(group) for group in self.trainer.param_groups]
        hashes = None if self.samples is None else self.samples.take(evaluates=self._script_inside)
        known = frozenset(self._known)
        same = {"step": self.steps, "divisor": self._divisor, "script_inside": self._script_inside}
        if (weight := getattr(self.trainer, "weight", None)) is not None:
            same["weight"] = weight
        step = self._fixed.step(
            known,
            self._last_after,
            **same,
            trainer=self._number,
            groups=None if options == self._options else options,
            pushes=[] if self._record is None else list(self._record.take()),
            samples=-1 if hashes is None else len(hashes) // 8,
            hashes=hashes or b"",
            epoch=() if self.samples is None else self.samples.epoch,
            still=self._still.take(),
            moved=self._moved,
        )
        self._write(step)
        if self._others is not None:
            number, state = ~self._number, self._others.states
            self._write(self._described(self._others, number, fresh=True))
            self._write(self._others.step(known, b"", **same, trainer=number, groups=options, state=state))
        self._steps_now, self._left = False, self._others
        self._options, self._last_after = options, step.after
        if self._on_worker != (self._communicator.steps_on == "worker"):  # the first step has shown it
            self._on_worker = not self._on_worker
            self._layout()
        self._states = dict.__len__(self._wrapped.state)
        self._begin()

    @counted
    def _step_ended(self, *_: Any) -> None:
        if self.trainer.completed_steps == self.steps:  # nothing that was not recorded: the step was skipped
            self._begin()
            if self._steps_now:
                self._still.forget()
                if self.samples is not None:
                    self.samples.take(evaluates=False)

    def _state_loaded(self, _: Optimizer) -> None:
        self._fresh = False
        self._layout()

    def _begin(self) -> None:
        self._known.clear()
        self._others, self._opened, self._script_inside = None, False, False
        self._divisor = 1.0
        self._graph_task = -1
        self._fixed.begin()

    @property
    def _recorded(self) -> list[StepElements]:
        return [self._fixed] if self._others is None else [self._fixed, self._others]

    # Elements.

    def _take_gradients(self, row: int) -> None:
        for each in self._recorded:
            each.take_gradients(row)

    def _take_parameters(self, row: int) -> None:
        for each in self._recorded:
            each.take_parameters(row)

    def _take_before(self) -> None:
        self._known.add(BEFORE)
        self._take_parameters(BEFORE)

    def _open(self) -> None:
        """Chooses other elements, if they are due in this step and it can be repeated from its state."""
        if self._opened:
            return
        self._opened = True
        self._moved, self._left = self._left is not None and self._left.moved(), None
        parameters = self._fixed.parameters
        whole = all(one.held == one.sample for one in parameters)
        alone = self._communicator.lockstep and not self.trainer.ahead
        if parameters and whole and alone and is_due(self.steps + 1):
            self._others = OtherElements(self.steps + 1, parameters)
            self._others.take_state(self._states_of(self._others.due))

    def _states_of(self, due: Mapping[str, Tensor]) -> Mapping[str, Mapping[str, Any]]:
        """Returns torch's state of parameters by name; of a hub that steps on rank 0 only."""
        hub = self._communicator.stepping_hub
        if self._on_worker or hub is None:
            return {name: dict.get(self._wrapped.state, one, {}) for name, one in due.items()}
        known = () if self._communicator.rank else self._optimizer._trained.buckets
        return hub.read_state([one for one in known if any(name in due for name, _ in one.named_parameters)])

    # Parameters.

    def _groups(self) -> list[tuple[int, ...]]:
        return [tuple(map(id, group["params"])) for group in self.trainer.param_groups]

    def _layout(self) -> None:
        """Takes in the parameters that the optimizer has now, behind those that it had."""
        self._grouped = self._groups()
        shards: dict[str, Tensor] | None = getattr(self.trainer, "shards", None)
        wholes: dict[str, Tensor] = getattr(self.trainer, "wholes", {})
        named = self.trainer.named_parameters if shards is None else shards
        names = {id(parameter): name for name, parameter in named.items()}
        known, fresh = {id(each.values) for each in self._fixed.parameters}, list[TappedParameter]()
        self._place = dict[int, int]()
        groups = enumerate(self.trainer.param_groups)
        everything = [(number, one) for number, group in groups for one in group["params"]]
        trained = [(number, one) for number, one in everything if one.requires_grad and one.numel()]
        expected = max(len(trained), len(known))
        for number, parameter in trained:
            self._place[id(parameter)] = number
            if id(parameter) in known:
                continue
            position = len(known)
            known.add(id(parameter))
            name = names.get(id(parameter), f"parameter {position}")
            chosen = sample(name, parameter.numel(), expected, parameter.element_size())
            source = wholes.get(name, parameter)
            accumulator = _accumulator(source)
            accumulator.register_prehook(self._hook(position))
            held = chosen.within(*shard(parameter))
            fresh.append(TappedParameter(name, parameter, source, chosen, *held, accumulator))
        self._fixed.extend(fresh)
        self._others = None
        self._hooked = self._is_hooked()
        self._write(self._described(self._fixed, self._number, fresh=self._fresh))
        self._options = []

    def _described(self, recorded: StepElements, number: int, *, fresh: bool) -> ModelLayout:
        parameters = recorded.parameters
        state: dict[str, Tensor] = getattr(self.trainer, "model_state", {})
        elements = ((one.name, each) for one in parameters for each in one.sample.elements)
        keys = [] if self._record is None else [self._record.key_of(*each) for each in elements]
        return ModelLayout(
            trainer=number,
            rank=self._communicator.rank,
            optimizer=_torch_name(self._optimizer),
            steps_on=self._communicator.steps_on,
            lockstep=self._communicator.lockstep,
            names=[one.name for one in parameters],
            dtypes=[str(one.values.dtype).removeprefix("torch.") for one in parameters],
            counts=[one.sample.number for one in parameters],
            groups=[self._place.get(id(one.values), -1) for one in parameters],
            keys=keys,
            wide=recorded.wide,
            fresh=fresh,
            hooked=self._hooked,
            facts=[BATCH_NORM] if any(name.endswith("running_mean") for name in state) else [],
            held=_held_bytes(parameters),
        )

    def _is_hooked(self) -> bool:
        """Whether hooks that are not ours run on some gradient after it is recorded."""
        if getattr(self.trainer, "hooked", False):
            return True
        for tapped in self._fixed.parameters:
            later = (tapped.source._post_accumulate_grad_hooks or {}).values()
            if not all(str(getattr(one, "__module__", "")).startswith("hubring.") for one in later):
                return True
        return False


def _accumulator(parameter: Tensor) -> Any:
    """Returns the node of autograd that adds a gradient to this parameter.

    A hook before it runs after all hooks of the tensor, and not for `torch.autograd.grad`.
    """
    with torch.enable_grad():
        function: Any = parameter.view_as(parameter).grad_fn
    return function.next_functions[0][0]


def _held_bytes(parameters: Sequence[TappedParameter]) -> bytes:
    """Returns one byte per recorded element: 1 if this rank holds it; empty if it holds all."""
    if all(one.held == one.sample for one in parameters):
        return b""
    taken = bytearray()
    for one in parameters:
        own = bytearray(one.sample.number)
        own[one.places] = bytes([1]) * one.held.number
        taken += own
    return bytes(taken)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a group's options that are numbers, or several of them."""
    numbers = {name: _numbers(value) for name, value in group.items() if name != "params"}
    return {name: value for name, value in numbers.items() if value is not None}


def _numbers(value: Any) -> Any:
    if isinstance(value, tuple | list):
        several = tuple(map(as_number, value))
        return None if None in several else several
    return value if isinstance(value, bool | int | float) else as_number(value)


def _torch_name(optimizer: Any) -> str:
    """Returns the name of the wrapped optimizer's class in torch.optim; empty if it is another class."""
    kind = type(getattr(optimizer, "wrapped", optimizer))
    name: str = kind.__name__
    return name if getattr(torch.optim, name, None) is kind else ""

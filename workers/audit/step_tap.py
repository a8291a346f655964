"""Records the steps of one optimizer, from outside of the code that exchanges and steps.

    own       what backward adds to a parameter's gradient, after the tensor's hooks, and what was there
              before; without backward, what the script sets
    arrived   the gradient when backward has returned: where workers step, the mean
    given     the gradient that `step()` gets, which the script may have clipped
    before    the parameters when the step's first gradient is made; where workers step, or no gradient was
              made, when `step()` begins
    after     the parameters when the step is completed

A rank that holds a part of a parameter, as with FSDP, records what it holds of all but `own`.

Hooks only read, so training is the same bit by bit. Elements are copied into one buffer, on the device of the
parameters, and leave it once a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hubring.ps.optim.hyperparameters import as_number
from hubring.workers.audit.audit_file import AuditStep, ModelLayout
from hubring.workers.audit.sample import TappedParameter, counted, local, sample, shard
from hubring.workers.communicators.base import Communicator

OWN, ARRIVED, GIVEN, BEFORE, AFTER = range(5)

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
        seconds: What recording has cost so far, without torch's time to call the hooks.
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
        self._parameters: list[TappedParameter] = []
        self._fresh = not trainer.had_state
        self._last_after = b""
        self._taken = torch.zeros(5, 0, dtype=torch.float32, device="cpu")
        self._owns = bytearray()
        self._graph_task = -1
        self._options: list[dict[str, Any]] = []
        self._states = 0
        """Parameters with a state in the optimizer, after the last step."""
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
        if not self._has_before:
            self._take_before()
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._graph_task = task
            # What is queued during the pass runs before what is queued at its end.
            Variable._execution_engine.queue_callback(
                lambda: Variable._execution_engine.queue_callback(self._pass_ended)
            )
        tapped, own = self._parameters[position], self._views[OWN][position]
        earlier = tapped.values.grad
        if isinstance(earlier, DTensor):  # a part of a mean: own gradients of earlier passes are recorded
            earlier = own.clone() if self._owns[position] else None
        elif earlier is not None:
            earlier = tapped.sample.of(earlier)
        own.copy_(tapped.sample.of(gradient))
        if earlier is not None:
            own.add_(earlier)
        self._owns[position] = 1

    @counted
    def _pass_ended(self) -> None:
        # Not means that are still in flight, or that a hub that steps shows once.
        in_flight = self._on_worker and self.trainer.ahead
        self._has_arrived = not (in_flight or getattr(self.trainer, "shows_means", False))
        if self._has_arrived:
            self._take_gradients(ARRIVED)

    @counted
    def _step_begins(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wrapped = self._wrapped
        replaced = vars(wrapped).get("step")
        hooked = bool(wrapped._optimizer_step_pre_hooks) or not (
            replaced is None or hasattr(replaced, "_wrapped_by_lr_sched")
        )
        closure = any(each is not None for each in (*args[1:], *kwargs.values()))  # args begin with self
        self._script_inside = closure or hooked
        scale = getattr(self._optimizer, "grad_scale", None)
        self._divisor = 1.0 if scale is None else float(scale)
        cleared = getattr(wrapped.state, "seen", False) or dict.__len__(wrapped.state) < self._states
        self._fresh = self._fresh and not cleared
        if cleared or self._grouped != self._groups() or self._hooked != self._is_hooked():
            self._layout()
        if self._on_worker and not any(self._owns):  # set by the script, and exchanged within step()
            self._owns = self._take_gradients(OWN)
        elif not (self._on_worker and self.trainer.ahead):
            self._has_given = True
            self._gives = self._take_gradients(GIVEN)
        if not self.trainer.ahead and (self._on_worker or not self._has_before):
            self._take_before()

    @counted
    def step_completed(self) -> None:
        """Records the step that was just completed."""
        self.steps = self.trainer.completed_steps
        if not self.trainer.ahead:  # else the parameters are still to be stepped
            self._take_parameters(AFTER)
        own, arrived, given, before, after = (row.numpy().tobytes() for row in self._taken.cpu())
        same = self._has_arrived and given == arrived
        before = before if self._has_before and before != self._last_after else b""
        after = b"" if self.trainer.ahead else after
        options = [_options(group) for group in self.trainer.param_groups]
        step = AuditStep(
            trainer=self._number,
            step=self.steps,
            groups=None if options == self._options else options,
            divisor=self._divisor,
            script_inside=self._script_inside,
            own=own,
            owns=bytes(self._owns),
            arrived=arrived if self._has_arrived else b"",
            given=given if self._has_given and not same else b"",
            gives=bytes(self._gives) if self._has_given else b"",
            before=before,
            after=after,
            pushes=[] if self._record is None else list(self._record.take()),
        )
        self._write(step)
        self._options, self._last_after = options, after
        if self._on_worker != (self._communicator.steps_on == "worker"):  # the first step has shown it
            self._on_worker = not self._on_worker
            self._layout()
        self._states = dict.__len__(self._wrapped.state)
        self._begin()

    @counted
    def _step_ended(self, *_: Any) -> None:
        if self.trainer.completed_steps == self.steps:  # nothing that was not recorded: the step was skipped
            self._begin()

    def _state_loaded(self, _: Optimizer) -> None:
        self._fresh = False
        self._layout()

    def _begin(self) -> None:
        self._has_before = self._has_arrived = self._has_given = self._script_inside = False
        self._divisor = 1.0
        self._graph_task = -1
        self._owns = bytearray(len(self._parameters))
        self._gives = bytearray(len(self._parameters))

    # Elements.

    def _take_gradients(self, row: int) -> bytearray:
        """Copies all gradients, zeros for those that are None; returns which there are."""
        there = bytearray(len(self._parameters))
        places, parts = list[Tensor](), list[Tensor]()
        for position, tapped in enumerate(self._parameters):
            gradient = tapped.values.grad
            if gradient is not None:
                there[position] = 1
                places.append(self._held_views[row][position])
                parts.append(tapped.held.of(local(gradient)))
        if len(parts) < len(self._parameters):
            self._taken[row].zero_()
        if parts:
            torch._foreach_copy_(places, parts)
        return there

    def _take_before(self) -> None:
        self._has_before = True
        self._take_parameters(BEFORE)

    def _take_parameters(self, row: int) -> None:
        parts = [each.held.of(local(each.values)) for each in self._parameters]
        torch._foreach_copy_(self._held_views[row], parts)

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
        known, place = {id(each.values) for each in self._parameters}, dict[int, int]()
        groups = enumerate(self.trainer.param_groups)
        everything = [(number, one) for number, group in groups for one in group["params"]]
        trained = [(number, one) for number, one in everything if one.requires_grad and one.numel()]
        expected = max(len(trained), len(self._parameters))
        for number, parameter in trained:
            place[id(parameter)] = number
            if id(parameter) in known:
                continue
            known.add(id(parameter))
            name = names.get(id(parameter), f"parameter {len(self._parameters)}")
            chosen = sample(name, parameter.numel(), expected, parameter.element_size())
            source = wholes.get(name, parameter)
            accumulator = _accumulator(source)
            accumulator.register_prehook(self._hook(len(self._parameters)))
            held = chosen.within(*shard(parameter))
            self._parameters.append(TappedParameter(name, parameter, source, chosen, *held, accumulator))
        self._make_room()
        self._hooked = self._is_hooked()
        state: dict[str, Tensor] = getattr(self.trainer, "model_state", {})
        elements = ((one.name, each) for one in self._parameters for each in one.sample.elements)
        keys = [] if self._record is None else [self._record.key_of(*each) for each in elements]
        self._write(
            ModelLayout(
                trainer=self._number,
                rank=self._communicator.rank,
                optimizer=_torch_name(self._optimizer),
                steps_on=self._communicator.steps_on,
                lockstep=self._communicator.lockstep,
                names=[one.name for one in self._parameters],
                dtypes=[str(one.values.dtype).removeprefix("torch.") for one in self._parameters],
                counts=[one.sample.number for one in self._parameters],
                groups=[place.get(id(one.values), -1) for one in self._parameters],
                keys=keys,
                wide=self._taken.dtype == torch.float64,
                fresh=self._fresh,
                hooked=self._hooked,
                facts=[BATCH_NORM] if any(name.endswith("running_mean") for name in state) else [],
                held=self._held_bytes(),
            )
        )
        self._options = []

    def _make_room(self) -> None:
        """Makes the buffer longer. What the current step has recorded stays."""
        counts = [one.sample.number for one in self._parameters]
        wide = any(one.values.dtype == torch.float64 for one in self._parameters)
        device = self._parameters[0].values.device if self._parameters else torch.device("cpu")
        dtype = torch.float64 if wide else torch.float32
        taken = torch.zeros(5, sum(counts), dtype=dtype, device=device)
        taken[:, : self._taken.shape[1]] = self._taken
        self._owns.extend(bytes(len(counts) - len(self._owns)))
        self._taken = taken
        self._views = [list(row.split(counts)) for row in taken]
        self._held_views = [
            [view[one.places] for view, one in zip(views, self._parameters, strict=True)]
            for views in self._views
        ]

    def _held_bytes(self) -> bytes:
        """Returns one byte per recorded element: 1 if this rank holds it; empty if it holds all."""
        if all(one.held == one.sample for one in self._parameters):
            return b""
        taken = bytearray()
        for one in self._parameters:
            own = bytearray(one.sample.number)
            own[one.places] = bytes([1]) * one.held.number
            taken += own
        return bytes(taken)

    def _is_hooked(self) -> bool:
        """Whether hooks that are not ours run on some gradient after it is recorded."""
        for tapped in self._parameters:
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

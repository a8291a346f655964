"""The hub's optimizer in the place of the wrapped one: its state, and its step.

The hub has the state; the wrapped optimizer gets it when the script looks, and sends what the script has
changed, before the next step. So `state`, `state_dict` and `load_state_dict` do what they do in torch,
and a checkpoint moves between hub, ring, one process and plain torch. The state of half-precision parameters
is float32 and has their master; torch rounds it when it loads it. A tensor of the state that the script keeps
is the hub's only until the next step; a later change of it is an error.

A script may register hooks on the wrapped optimizer's `step`, or replace `step` itself, as schedulers do. All
of that runs in torch's order: the wrapped optimizer's `step` is called, and the exchange is its last hook
before the step. The optimizer then finds no gradients, so it changes nothing: the hub has stepped.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer
from xxhash import xxh3_64

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.optimizer_state import MASTER, STEP
from hubring.ps.core.torch_internals import has_step_hooks, run_first_after_step, version
from hubring.ps.optim.hyperparameters import STATE
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.communicators.base import ParameterState, SteppingHub
from hubring.workers.optimizer.wrapping import OptimizerWrapper
from hubring.workers.reducer.groups import parameters_of


class ShownState(defaultdict[Any, dict[str, Any]]):
    """`optimizer.state` where the hub steps: empty until the script looks, and then the hub's.

    Args:
        factory: Makes the state of a parameter that has none, as in torch.

    Attributes:
        fetch: Returns the hub's state; None once it is here.
        of_hub: Whether the hub has the state.
    """

    of_hub = True

    def __init__(self, factory: Callable[[], dict[str, Any]] = dict) -> None:
        super().__init__(factory)
        self.fetch: Callable[[], dict[Any, dict[str, Any]]] | None = None

    @property
    def seen(self) -> bool:
        """Whether the script has looked at the hub's state."""
        return self.of_hub and self.fetch is None

    def fill(self) -> None:
        """Gets the hub's state, once."""
        if self.fetch is not None:
            super().update(self.fetch())
            self.fetch = None

    def __reduce__(self) -> Any:
        """Copies and pickles as the state of torch's own optimizers."""
        return partial(defaultdict, dict), (dict(self),)


def _filling(name: str) -> Callable[..., Any]:
    inherited = getattr(defaultdict, name)

    def method(self: ShownState, *args: Any, **kwargs: Any) -> Any:
        self.fill()
        return inherited(self, *args, **kwargs)

    return method


for _name in (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__"),
    *("__or__", "__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "copy", "get", "items"),
    *("keys", "pop", "popitem", "setdefault", "update", "values"),
):
    setattr(ShownState, _name, _filling(_name))


class HubOptimizerState:
    """Makes the hub's state the wrapped optimizer's, and what the script changes in it the hub's.

    Args:
        optimizer: The wrapped optimizer.
        hub: The hub.
    """

    def __init__(self, optimizer: Optimizer, hub: SteppingHub) -> None:
        self._optimizer = optimizer
        self._hub = hub
        self._reach: Callable[[], list[Bucket]] | None = None
        self._shown = ShownState()
        self._fetched = 0
        self._on_hub: set[Tensor] = set()
        self._extra: dict[Tensor, dict[str, Any]] = {}
        """What the script has put into the state that is no tensor, which the hub does not have."""
        self._handed: list[tuple[weakref.ref[Tensor], int]] = []
        """Tensors of the state that the script may have kept, and their versions when a step began."""

    def follow(self, reach: Callable[[], list[Bucket]]) -> None:
        """Makes the optimizer's `state`, `state_dict` and `load_state_dict` reach the hub.

        Args:
            reach: Returns the buckets of its newest owner, once no step of them is under way.
        """
        earlier, self._reach = self._reach, reach
        if earlier is None:
            loaded = deque[dict[str, Any]](maxlen=1)  # of a load that fails one is left
            self._loads = [
                self._optimizer.register_load_state_dict_pre_hook(lambda _, saved: loaded.append(saved)),
                self._optimizer.register_load_state_dict_post_hook(lambda _: self._load(loaded.pop())),
            ]

    def _load(self, saved: dict[str, Any]) -> None:
        """Sends a state that torch has loaded, as it was before torch rounded it to the parameters' dtype."""
        for group, kept in zip(self._optimizer.param_groups, saved["param_groups"], strict=True):
            for parameter, number in zip(group["params"], kept["params"], strict=True):
                loaded = self._optimizer.state.get(parameter, {})
                for name, exact in saved["state"].get(number, {}).items():
                    one = loaded.get(name)
                    tensors = isinstance(exact, Tensor) and isinstance(one, Tensor)
                    if tensors and exact.dtype != one.dtype and torch.equal(one, exact.to(one)):
                        loaded[name] = exact
        self.send()

    def send(self) -> None:
        """Makes the optimizer's state the hub's. Raises as `SteppingHub.write_state`."""
        assert self._reach is not None
        buckets = self._reach()
        self._hub.write_state(buckets, self.take(buckets))
        self.show(buckets)

    def take(self, buckets: Sequence[Bucket]) -> dict[str, ParameterState]:
        """Returns the state that the optimizer has of these parameters, by name, and takes it away.

        What only the hub has does not count.

        Raises:
            ConfigError: A state lacks a tensor that the hub's optimizer needs.
        """
        states: dict[str, ParameterState] = {}
        whole = self._optimizer.state
        for bucket in buckets:
            for name, parameter in bucket.named_parameters:
                # Without what the hub has, if the script has not looked.
                state = dict.pop(whole, parameter, {})
                own = {key: value for key, value in state.items() if isinstance(value, Tensor)}
                self._extra[parameter] = {key: value for key, value in state.items() if key not in own}
                if own:
                    states[name] = own
                    _check_complete(name, own, bucket.spec.optimizer)
        return states

    def show(self, buckets: Sequence[Bucket]) -> None:
        """Shows the hub's state of all buckets as `optimizer.state`, fetched when the script looks."""
        self._on_hub = {parameter for bucket in buckets for parameter in bucket.parameters}
        # What is left is the state of parameters that the hub does not have, since they are frozen.
        self._hide(self._left(self._optimizer.state))
        self._optimizer.state = self._shown

    def _hide(self, left: dict[Any, dict[str, Any]]) -> None:
        """Empties the state, which the script may have kept, until it looks; but for what is `left`."""
        dict.clear(self._shown)
        dict.update(self._shown, left)
        self._shown.fetch = self._fetch
        self._handed = [(one, version(kept)) for one, _ in self._handed if (kept := one()) is not None]

    def give_up(self) -> None:
        """Gives the optimizer its state, for good, in the parameters' dtype, which torch's steps need."""
        self._shown.fill()
        for parameter in self._on_hub & self._shown.keys():
            state = self._shown[parameter]
            state.pop(MASTER, None)
            tensors = ((name, one) for name, one in state.items() if isinstance(one, Tensor) and name != STEP)
            state.update({name: one.to(parameter.dtype) for name, one in tensors})
        self._shown.of_hub = False
        for hook in self._loads:
            hook.remove()

    def changed(self) -> bool:
        """Whether the script has changed the state that it saw. What it has only read is dropped.

        Raises:
            ConfigError: It has changed a tensor that it kept from before a step.
        """
        if self._optimizer.state is not self._shown:
            return True
        if self._shown.fetch is not None:
            if self._handed and any(
                (kept := one()) is not None and version(kept) != then for one, then in self._handed
            ):
                raise ConfigError(
                    "the script changed a tensor of optimizer.state that it has kept from an earlier step,"
                    " but the hub has the state: take it from optimizer.state again in each step"
                )
            return False
        left = self._left(self._shown)
        if _digest({key: one for key, one in self._shown.items() if key not in left}) != self._fetched:
            return True
        self._hide(left)
        return False

    def _left(self, state: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
        """Returns the state of what is not on the hub."""
        return {key: one for key, one in dict.items(state) if key not in self._on_hub}

    def _fetch(self) -> dict[Any, dict[str, Any]]:
        assert self._reach is not None
        buckets = self._reach()
        states = self._hub.read_state(buckets)
        groups = {one: group for group in self._optimizer.param_groups for one in group["params"]}
        found: dict[Any, dict[str, Any]] = {}
        for bucket in buckets:
            for name, parameter in bucket.named_parameters:
                options = groups.get(parameter, self._optimizer.defaults)
                state = self._extra.get(parameter, {}) | {
                    key: value if key == "step" else value.to(parameter.device)
                    for key, value in states.get(name, {}).items()
                    if not _is_unused(options, key, value)
                }
                if MASTER in state:  # zeros are of slices without one: there it is the parameter
                    master = state[MASTER]
                    state[MASTER] = torch.where(master == 0, parameter.detach(), master)
                if state:
                    found[parameter] = state
        self._fetched = _digest(found)
        every = chain.from_iterable(map(dict.values, found.values()))
        self._handed += [(weakref.ref(one), 0) for one in every if isinstance(one, Tensor)]
        return found


def _check_complete(name: str, state: Mapping[str, Tensor], optimizer: str) -> None:
    """Checks a state before any is sent: a shard would refuse some slices and take others."""
    if lacks := [one for one in STATE.get(optimizer, ()) if one not in state]:
        raise ConfigError(
            f"the optimizer state of {name} lacks {', '.join(lacks)}, which {optimizer} needs; load a state"
            " of the same optimizer"
        )


def _digest(states: Mapping[Any, Mapping[str, Any]]) -> int:
    """Returns a number that tells states apart."""
    digest = xxh3_64()
    for parameter, state in states.items():
        if state:
            digest.update(id(parameter).to_bytes(8))
        for name, value in state.items():
            digest.update(name.encode())
            if isinstance(value, Tensor):
                flat = value.detach().to("cpu").contiguous().view(-1)
                digest.update(flat.view(torch.uint8).numpy().data)
            else:
                digest.update(repr(value).encode())
    return digest.intdigest()


_OPTIONS = {"momentum_buffer": "momentum", "max_exp_avg_sq": "amsgrad", "grad_avg": "centered"}


def _is_unused(options: dict[str, Any], name: str, value: Tensor) -> bool:
    """Whether the hub has a tensor only for other groups: this one does not use its option."""
    return name in _OPTIONS and not options[_OPTIONS[name]] and not bool(value.any())


def step_on_hub(wrapper: OptimizerWrapper, exchange: Callable[[], None], check: Callable[[], None]) -> None:
    """Takes the hub's step in the place of a wrapped optimizer's. Raises as `exchange` and `check`.

    Args:
        wrapper: Wraps the optimizer.
        exchange: Sends what is left to send, and waits for everything.
        check: Checks that hooks have changed no gradients that were sent.
    """
    optimizer = wrapper.wrapped
    if "step" not in vars(optimizer) and not has_step_hooks(optimizer):
        exchange()
        return
    with HiddenGradients(parameters_of(optimizer)) as gradients:

        def before(*_: object) -> None:
            check()
            exchange()
            gradients.hide()

        last = optimizer.register_step_pre_hook(before)
        first = optimizer.register_step_post_hook(lambda *_: gradients.show())
        run_first_after_step(optimizer, first.id)
        try:
            wrapper.step_wrapped()
        finally:
            last.remove()
            first.remove()


class HiddenGradients:
    """A block in which parameters' gradients can be taken away and given back; after it they are back."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._hidden: list[tuple[torch.nn.Parameter, Tensor]] = []

    def hide(self) -> None:
        """Takes all gradients away, so that a step changes nothing."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def show(self) -> None:
        """Gives them back."""
        while self._hidden:
            parameter, gradient = self._hidden.pop()
            parameter.grad = gradient

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.show()

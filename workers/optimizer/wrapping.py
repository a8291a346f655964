"""An optimizer that wraps another one.

A framework may keep the optimizer that the script made, and step that. Hooks of torch that run for every
optimizer see it, so that the step is the wrapper's all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.torch_internals import keep_compiler_out, share_state_hooks


def _of_wrapped(name: str) -> Any:
    """Returns a property that reads and assigns the wrapped optimizer's attribute."""

    def read(self: OptimizerWrapper) -> Any:
        return getattr(self.wrapped, name)

    def assign(self: OptimizerWrapper, value: Any) -> None:
        setattr(self.wrapped, name, value)

    return property(read, assign)


class OptimizerWrapper(Optimizer):
    """Shares groups, state and defaults with `wrapped`, so that schedulers can use either one.

    The wrapper has its own hooks on `step`. It shares the hooks on `state_dict` and
    `load_state_dict`, because the wrapped optimizer runs them.

    Attributes:
        wrapped: The wrapped optimizer.
        had_state: Whether it had taken steps before it was wrapped.
        model: The model that it trains, if the script gave one.

    Raises:
        ConfigError: The optimizer is already wrapped, or is none of torch's.
    """

    steps_elsewhere = False
    """Whether the hub steps, and not the wrapped optimizer."""
    param_groups = _of_wrapped("param_groups")
    defaults = _of_wrapped("defaults")
    state = _of_wrapped("state")

    def __init__(self, optimizer: Optimizer, model: Module | None = None) -> None:
        if not isinstance(optimizer, Optimizer) or _framework(optimizer):
            raise ConfigError(f"{_kind(optimizer)}, not a torch.optim.Optimizer: {_instead(optimizer)}")
        if isinstance(optimizer, OptimizerWrapper):
            raise ConfigError(f"the optimizer is already a {type(optimizer).__name__}: wrap torch's own once")
        self.wrapped, self.model = optimizer, model
        self._steps_wrapped = False
        _newest[optimizer] = ref(self)
        keep_compiler_out()
        # Optimizer.__init__ would make separate groups; __setstate__ only makes the hooks.
        self.__setstate__({})
        share_state_hooks(self, optimizer)
        # Adagrad has a state, of step 0, from the start.
        self.had_state = any(float(state.get("step", 1)) for state in dict.values(optimizer.state))

    def step_wrapped(self, *closure: Callable[[], Any]) -> Any:
        """Lets the wrapped optimizer step, as a part of this one's step."""
        self._steps_wrapped = True
        try:
            return self.wrapped.step(*closure)
        finally:
            self._steps_wrapped = False

    def before_wrapped(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Begins a step that the script asks the wrapped optimizer for; returns the closure to give it."""
        return closure

    def after_wrapped(self) -> None:
        """Ends such a step."""

    def __getattr__(self, name: str) -> Any:
        """Returns what only the wrapped optimizer has: its own attributes and methods, such as `train()`."""
        if name.startswith("__") or name == "wrapped":  # not made yet, or a protocol that copies would have
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.wrapped, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer."""
        self.wrapped.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's state dict."""
        return self.wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the wrapped optimizer. What raises an error changes nothing, unlike in torch."""
        before = self.param_groups, self.state
        try:
            self.wrapped.load_state_dict(state_dict)
        except BaseException:
            self.param_groups, self.state = before
            raise

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Always raises: ranks, hooks and connections cannot be copied.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"a {type(self).__name__} cannot be copied or pickled: save optimizer.state_dict(), and load it"
            " with load_state_dict()"
        )

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The wrapped optimizer's class, for scripts that ask `isinstance(optimizer, torch.optim.SGD)`."""
        # Until it is made, torch puts hooks around the `step` of this class.
        return type(self.wrapped) if "had_state" in vars(self) else type(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wrapped!r})"


_newest: WeakKeyDictionary[Optimizer, ref[OptimizerWrapper]] = WeakKeyDictionary()
"""The newest wrapper of each optimizer."""


def _wrapper(optimizer: Optimizer) -> OptimizerWrapper | None:
    """Returns the wrapper of an optimizer that steps now, unless it is the wrapper that lets it step."""
    found = _newest.get(optimizer)
    wrapper = None if found is None else found()
    return None if wrapper is None or wrapper._steps_wrapped else wrapper


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    wrapper = _wrapper(optimizer)
    if wrapper is None:
        return None
    placed = len(args) > 1
    others = [*args[2:], *(kwargs.keys() - {"closure"})]
    if others and wrapper.steps_elsewhere:
        raise ConfigError(
            f"step() of the wrapped optimizer got {', '.join(map(str, others))}, which the hub does not know:"
            " let the workers step with hubring.init(aggregate=True) or --aggregate"
        )
    given = wrapper.before_wrapped(args[1] if placed else kwargs.get("closure"))
    if given is None:
        return None
    return ((optimizer, given, *args[2:]), kwargs) if placed else (args, {**kwargs, "closure": given})


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    wrapper = _wrapper(optimizer)
    if wrapper is not None:
        wrapper.after_wrapped()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)


def _kind(given: object) -> str:
    """Returns what was given as the optimizer, as the start of a sentence."""
    if isinstance(given, type):
        return f"the optimizer is the class {given.__name__}"
    kind = type(given)
    home = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"the optimizer is a {home}{kind.__qualname__}"


def _framework(given: object) -> str:
    """Returns what to do with the optimizer of a framework that exchanges gradients itself."""
    home = type(given).__module__.partition(".")[0]
    return {
        "accelerate": "leave DistributedOptimizer out, and run the script with --as-gloo",
        "keras": "use hubring.horovod.keras.DistributedOptimizer",
    }.get(home, "")


def _instead(given: object) -> str:
    """Returns what to write instead."""
    if framework := _framework(given):
        return f"{framework} (workers/examples/FRAMEWORKS.md)"
    if isinstance(given, type):
        return f"make one, as in {given.__name__}(model.parameters(), lr=0.1)"
    if isinstance(getattr(given, "optimizer", None), Optimizer):
        return "pass its attribute optimizer"  # a scheduler, or a framework's wrapper
    if isinstance(given, list | tuple | dict):
        return "make a DistributedOptimizer for each optimizer in it"
    if isinstance(given, Module):
        return "call DistributedOptimizer(optimizer, model), the optimizer first"
    return (
        "make one from torch.optim, or a subclass of torch.optim.Optimizer; for the optimizer of another"
        " framework, average the gradients with hubring.grouped_allreduce before it steps (deploy/SUPPORT.md)"
    )


def asks_for_loss(optimizer: Optimizer) -> bool:
    """Whether the optimizer's `step` requires a closure, as LBFGS does."""
    closure = signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty

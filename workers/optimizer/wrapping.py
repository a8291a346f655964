"""An optimizer that wraps another one."""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch.optim import Optimizer

from hubring.ps.core.errors import ConfigError
from hubring.workers.optimizer.hub_optimizer_state import HeldByHub


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

    Raises:
        ConfigError: The optimizer is already wrapped.
    """

    _hub_holds_state = False
    param_groups = _of_wrapped("param_groups")
    defaults = _of_wrapped("defaults")

    def __init__(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, OptimizerWrapper):
            raise ConfigError(
                f"the optimizer is already a {type(optimizer).__name__}: wrap the torch optimizer once"
            )
        self.wrapped = optimizer
        # Adagrad has a state, of step 0, from the start.
        self.had_state = any(float(state.get("step", 1)) for state in optimizer.state.values())
        # Optimizer.__init__ would make separate groups; __setstate__ only makes the hooks.
        self.__setstate__({})
        for name in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
            hooks = f"_optimizer_{name}_hooks"
            setattr(self, hooks, getattr(optimizer, hooks))

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state; where the hub steps, an object that says how to reach the hub's."""
        return HeldByHub() if self._hub_holds_state else self.wrapped.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._hub_holds_state:
            HeldByHub().clear()  # raises: replacing the state is no different from clearing it
        self.wrapped.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer."""
        self.wrapped.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's state dict."""
        return self.wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the wrapped optimizer."""
        self.wrapped.load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Always raises: ranks, hooks and connections cannot be copied.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"a {type(self).__name__} cannot be copied or pickled: save optimizer.state_dict(), and load it"
            " with load_state_dict()"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wrapped!r})"


def asks_for_loss(optimizer: Optimizer) -> bool:
    """Whether the optimizer's `step` requires a closure, as LBFGS does."""
    closure = signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty

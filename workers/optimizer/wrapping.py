"""An optimizer around another: what `torch.optim.Optimizer` asks of one, and no more."""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch.optim import Optimizer

from hubring.ps.core.errors import ConfigError


def _of_wrapped(name: str) -> Any:
    """An attribute that is the wrapped optimizer's, to read and to assign."""

    def read(self: OptimizerWrapper) -> Any:
        return getattr(self.wrapped, name)

    def assign(self: OptimizerWrapper, value: Any) -> None:
        setattr(self.wrapped, name, value)

    return property(read, assign)


class OptimizerWrapper(Optimizer):
    """Shares groups, state and defaults with `wrapped`, so that schedulers may hold either.

    Hooks on `step` are the wrapper's own; those on `state_dict` and
    `load_state_dict` are shared, as the wrapped optimizer runs them.

    Attributes:
        wrapped: The optimizer given.

    Raises:
        ConfigError: It is wrapped already.
    """

    param_groups = _of_wrapped("param_groups")
    state = _of_wrapped("state")
    defaults = _of_wrapped("defaults")

    def __init__(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, OptimizerWrapper):
            raise ConfigError(
                f"the optimizer is a {type(optimizer).__name__} already: wrap torch's own, once"
            )
        self.wrapped = optimizer
        # Optimizer.__init__ would make groups of our own; this makes the hooks alone.
        self.__setstate__({})
        for name in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
            hooks = f"_optimizer_{name}_hooks"
            setattr(self, hooks, getattr(optimizer, hooks))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses: all ranks have agreed on the parameters.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"add parameter groups before making {type(self).__name__}: ranks agree on them there"
        )

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self.wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the wrapped optimizer."""
        self.wrapped.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wrapped!r})"


def asks_for_loss(optimizer: Optimizer) -> bool:
    """Whether it steps by evaluating the loss for itself, as LBFGS does: its `step` needs a closure."""
    closure = signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty

"""The state of an optimizer that the hub steps, in the place where torch keeps it.

The hub has the state; the wrapped optimizer has it only while the script saves or loads it. So `state_dict`
and `load_state_dict` do what they do in torch, and a checkpoint moves between hub, ring, one process and
plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hubring.ps.core.errors import ConfigError
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.communicators.base import Communicator, ParameterState


class HeldByHub:
    """In the place of `optimizer.state` where the hub steps: false, as an empty state; use is an error."""

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(
            f"optimizer.state.{name}: the hub holds the optimizer's state. Read a copy with"
            " optimizer.state_dict()['state'], change that, and replace the hub's with"
            " optimizer.load_state_dict(...); or let the workers step with hubring.init(aggregate=True) or"
            " --aggregate"
        )

    def __getitem__(self, key: object) -> Any:
        return self.__getattr__("[...]")

    def __setitem__(self, key: object, value: object) -> None:
        self.__getattr__("[...]")

    def __delitem__(self, key: object) -> None:
        self.__getattr__("[...]")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__getattr__("keys()"))

    def __contains__(self, key: object) -> bool:
        return bool(self.__getattr__("keys()"))

    def __len__(self) -> int:
        return len(self.__getattr__("keys()"))


class HubOptimizerState:
    """Moves an optimizer's state to and from the hub.

    Args:
        optimizer: The wrapped optimizer.
        communicator: Reaches the hub.
        buckets: Returns the buckets of the parameters.
        settle: Waits for the steps that are under way.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        communicator: Communicator,
        buckets: Callable[[], Sequence[Bucket]],
        settle: Callable[[], None],
    ) -> None:
        self._optimizer = optimizer
        self._communicator = communicator
        self._buckets = buckets
        self._settle = settle

    def follow(self) -> None:
        """Makes the optimizer's `state_dict` and `load_state_dict` reach the hub from now on."""
        optimizer = self._optimizer
        optimizer.register_state_dict_pre_hook(lambda _: self._fetch())
        optimizer.register_state_dict_post_hook(lambda *_: self._optimizer.state.clear())
        optimizer.register_load_state_dict_post_hook(lambda _: self._send())

    def take(self, buckets: Sequence[Bucket]) -> dict[str, ParameterState]:
        """Returns the state that the optimizer has, by parameter name, and takes it away."""
        states: dict[str, ParameterState] = {}
        for bucket in buckets:
            for name, parameter in bucket.named_parameters:
                state = self._optimizer.state.get(parameter, {})
                own = {key: value for key, value in state.items() if isinstance(value, Tensor)}
                if own:
                    states[name] = own
        self._optimizer.state.clear()
        return states

    def _fetch(self) -> None:
        self._settle()
        states = self._communicator.read_state(self._buckets())
        for bucket in self._buckets():
            for name, parameter in bucket.named_parameters:
                state = states.get(name)
                if state:
                    self._optimizer.state[parameter] = {
                        key: value if key == "step" else value.to(parameter.device)
                        for key, value in state.items()
                    }

    def _send(self) -> None:
        self._settle()
        buckets = self._buckets()
        self._communicator.write_state(buckets, self.take(buckets))

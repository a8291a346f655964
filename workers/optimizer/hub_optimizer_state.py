"""The state of an optimizer that the hub steps, in the place where torch keeps it.

The hub has the state; the wrapped optimizer has it only while the script saves or loads it. So `state_dict`
and `load_state_dict` do what they do in torch, and a checkpoint moves between hub, ring, one process and
plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

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


class Owner(Protocol):
    """What the state belongs to."""

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of the parameters."""

    def check_owner(self) -> None:
        """Raises ConfigError if the hub steps these parameters with another optimizer by now."""

    def settle(self) -> None:
        """Waits for the steps that are under way."""


class HubOptimizerState:
    """Moves an optimizer's state to and from the hub.

    Args:
        optimizer: The wrapped optimizer.
        communicator: Reaches the hub.
    """

    def __init__(self, optimizer: Optimizer, communicator: Communicator) -> None:
        self._optimizer = optimizer
        self._communicator = communicator
        self._owner: Owner | None = None

    def follow(self, owner: Owner) -> None:
        """Makes the optimizer's `state_dict` and `load_state_dict` reach the hub for its newest owner."""
        earlier, self._owner = self._owner, owner
        if earlier is None:
            optimizer = self._optimizer
            optimizer.register_state_dict_pre_hook(lambda _: self._fetch())
            optimizer.register_state_dict_post_hook(lambda *_: self._forget())
            optimizer.register_load_state_dict_post_hook(lambda _: self.send())

    def send(self) -> None:
        """Makes the optimizer's state the hub's. Raises as `Communicator.write_state`."""
        buckets = self._reached()
        self._communicator.write_state(buckets, self.take(buckets))

    def take(self, buckets: Sequence[Bucket]) -> dict[str, ParameterState]:
        """Returns the state that the optimizer has of these parameters, by name, and takes it away."""
        states: dict[str, ParameterState] = {}
        for bucket in buckets:
            for name, parameter in bucket.named_parameters:
                state = self._optimizer.state.pop(parameter, {})
                own = {key: value for key, value in state.items() if isinstance(value, Tensor)}
                if own:
                    states[name] = own
        return states

    def _fetch(self) -> None:
        buckets = self._reached()
        states = self._communicator.read_state(buckets)
        for bucket in buckets:
            for name, parameter in bucket.named_parameters:
                state = states.get(name)
                if state:
                    self._optimizer.state[parameter] = {
                        key: value if key == "step" else value.to(parameter.device)
                        for key, value in state.items()
                    }

    def _forget(self) -> None:
        assert self._owner is not None
        self.take(self._owner.buckets)

    def _reached(self) -> list[Bucket]:
        assert self._owner is not None
        self._owner.check_owner()
        self._owner.settle()
        return self._owner.buckets

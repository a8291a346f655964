"""A rank's own state, on its way to the server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from hubring.ps.core.errors import ServerUnreachable
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.optimizer.own_state import OwnStates, decode


def sending(send: Callable[..., None]) -> tuple[torch.Tensor, OwnStates]:
    """Returns a buffer, and what sends it beside a frozen parameter."""
    mean, frozen = torch.ones(1), torch.zeros(1)
    server: Any = SimpleNamespace(follow=lambda *_: None, take_wish=lambda: False, send=send)
    model: Any = SimpleNamespace(
        buffers=lambda: {"mean": mean}, frozen=lambda: {"table": frozen}, settle=lambda: None
    )
    states = OwnStates(server, LocalCommunicator(), True, lambda: 1)
    states._rest = model
    return mean, states


def test_a_state_is_that_of_its_step_though_training_goes_on_while_it_is_sent() -> None:
    sent, goes_on = list[Any](), threading.Event()

    def send(content: memoryview, step: int, *, shared: bool) -> None:
        assert goes_on.wait(10)
        sent.append(decode(bytes(content)))

    mean, states = sending(send)
    states.save_in_passing()
    mean.fill_(2.0)
    goes_on.set()
    states.close()
    assert sent[-1]["buffers"]["mean"].item() == 1.0


def test_frozen_parameters_are_sent_until_the_server_has_them() -> None:
    sent = list[bool]()

    def send(content: memoryview, step: int, *, shared: bool) -> None:
        sent.append(shared)
        if len(sent) == 1:
            raise ServerUnreachable("gone for a moment")

    _, states = sending(send)
    for _ in range(3):
        states.save()
    assert sent == [True, True, False, False]

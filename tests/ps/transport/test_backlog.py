"""Whoever reads from a peer pauses while too much of it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from hubring.ps.transport.backlog import BOUND, Backlog

PATIENCE = 10.0


def test_a_backlog_is_full_at_its_bound() -> None:
    backlog = Backlog()
    backlog.add(BOUND - 1)
    assert not backlog.full
    backlog.await_room()
    backlog.add(1)
    assert backlog.full


def test_one_message_may_be_larger_than_the_bound() -> None:
    backlog = Backlog()
    backlog.add(3 * BOUND)
    backlog.remove(3 * BOUND)
    backlog.await_room()


@pytest.mark.parametrize("let_go", [lambda backlog: backlog.remove(1), Backlog.close], ids=["room", "close"])
def test_a_reader_waits_until(let_go: Callable[[Backlog], None]) -> None:
    backlog, order = Backlog(), list[str]()

    def read() -> None:
        backlog.await_room()
        order.append("read on")

    backlog.add(BOUND)
    reader = threading.Thread(target=read)
    reader.start()
    order.append("let go")
    let_go(backlog)
    reader.join(PATIENCE)
    assert order == ["let go", "read on"]

"""What waits for a wire leaves by priority, as there is room, and only once."""

from __future__ import annotations

import threading

from hubring.ps.transport.outbox import Outbox

PATIENCE = 10.0


def full(window: int = 10) -> tuple[Outbox[str], list[str]]:
    """An outbox with one item of 10 bytes under way, and what it says when there is room."""
    told: list[str] = []
    outbox: Outbox[str] = Outbox(lambda: told.append("room"), window)
    outbox.put("item", nbytes=10)
    assert outbox.take() is not None
    return outbox, told


def test_a_message_beyond_the_window_goes_alone() -> None:
    outbox, _ = full()
    outbox.put("large", nbytes=11)
    assert outbox.take() is None
    outbox.left(10)
    assert outbox.take() is not None


def test_an_urgent_message_without_room_is_not_overtaken_by_a_small_one() -> None:
    outbox, _ = full(window=15)
    outbox.put("urgent", 2, 15)
    outbox.put("small", 1, 1)
    assert outbox.take() is None
    outbox.left(10)
    assert outbox.take() == "urgent"


def test_room_is_told_only_where_something_waits() -> None:
    outbox, told = full()
    outbox.left(10)
    assert told == []
    outbox.put("item", nbytes=10)
    assert outbox.take() is not None
    outbox.put("item", nbytes=10)
    outbox.left(10)
    assert told == ["room"]


def test_room_given_by_another_thread_is_never_missed() -> None:
    """Whoever puts and finds no room is told of any that comes later."""
    rung = threading.Event()
    outbox: Outbox[str] = Outbox(rung.set, window=10)
    under_way = threading.Semaphore(0)
    count = 3000

    def wire() -> None:
        for _ in range(count):
            under_way.acquire()
            outbox.left(10)

    kernel = threading.Thread(target=wire)
    kernel.start()
    for _ in range(count):
        outbox.put("item", nbytes=10)
        while outbox.take() is None:
            assert rung.wait(PATIENCE), "nobody told of the room"
            rung.clear()
        under_way.release()
    kernel.join(PATIENCE)
    assert outbox.idle

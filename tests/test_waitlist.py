from __future__ import annotations

import threading

from ps.transport.base import Message
from ps.transport.waitlist import Waitlist


def message(priority: int, nbytes: int = 10, header: bytes = b"header") -> Message:
    return Message(header, memoryview(bytes(nbytes)), priority=priority)


def full(window: int = 10) -> tuple[Waitlist, list[str]]:
    """An waitlist with one message of 10 bytes under way, and what it says when there is room."""
    told: list[str] = []
    waitlist = Waitlist(lambda: told.append("room"), window)
    waitlist.put(message(0))
    assert waitlist.take() is not None
    return waitlist, told


def test_highest_priority_goes_first_and_of_equals_the_earliest() -> None:
    waitlist, _ = full(window=1000)
    for header, priority in ((b"a", 1), (b"b", 3), (b"c", 2), (b"d", 3), (b"e", 1)):
        waitlist.put(message(priority, header=header))
    taken = [each.header for each in iter(waitlist.take, None)]
    assert taken == [b"b", b"d", b"c", b"a", b"e"]


def test_no_more_than_the_window_is_under_way() -> None:
    waitlist, _ = full(window=25)
    for _ in range(3):
        waitlist.put(message(0))
    assert waitlist.take() is not None
    assert waitlist.take() is None
    assert len(waitlist) == 2


def test_a_late_message_overtakes_what_waits() -> None:
    waitlist, _ = full()
    early, late = message(1), message(2)
    waitlist.put(early)
    assert waitlist.take() is None
    waitlist.put(late)
    waitlist.left(10)
    assert waitlist.take() is late


def test_a_message_beyond_the_window_goes_alone() -> None:
    waitlist, _ = full()
    waitlist.put(message(0, nbytes=11))
    assert waitlist.take() is None
    waitlist.left(10)
    assert waitlist.take() is not None


def test_an_urgent_message_without_room_is_not_overtaken_by_a_small_one() -> None:
    waitlist, _ = full(window=15)
    urgent, small = message(2, nbytes=15), message(1, nbytes=1)
    waitlist.put(urgent)
    waitlist.put(small)
    assert waitlist.take() is None
    waitlist.left(10)
    assert waitlist.take() is urgent


def test_messages_without_payload_take_no_room() -> None:
    waitlist, _ = full()
    waitlist.put(Message(b"header"))
    assert waitlist.take() is not None


def test_room_is_told_only_where_something_waits() -> None:
    waitlist, told = full()
    waitlist.left(10)
    assert told == []
    waitlist.put(message(0))
    assert waitlist.take() is not None
    waitlist.put(message(0))
    waitlist.left(10)
    assert told == ["room"]


def test_at_the_end_all_goes_without_room() -> None:
    waitlist, _ = full()
    waitlist.put(message(0))
    assert waitlist.take(at_any_rate=True) is not None


def test_idle_is_when_all_has_left() -> None:
    waitlist, _ = full()
    assert not waitlist.idle
    waitlist.left(10)
    assert waitlist.idle
    waitlist.put(message(0))
    assert not waitlist.idle


def test_room_given_by_another_thread_is_never_missed() -> None:
    """Whoever puts and finds no room is told of any that comes later."""
    rung = threading.Event()
    waitlist = Waitlist(rung.set, window=10)
    under_way = threading.Semaphore(0)
    count = 3000

    def wire() -> None:
        for _ in range(count):
            under_way.acquire()
            waitlist.left(10)

    kernel = threading.Thread(target=wire)
    kernel.start()
    for _ in range(count):
        waitlist.put(message(0))
        while waitlist.take() is None:
            assert rung.wait(10.0), "nobody told of the room"
            rung.clear()
        under_way.release()
    kernel.join(10.0)
    assert waitlist.idle

"""What waits for a wire leaves by priority, as there is room, and only once."""

from __future__ import annotations

import itertools
import threading

from hubring.ps.transport.outbox import Outbox

PATIENCE = 10.0


def filled(*items: tuple[str, int]) -> Outbox[str]:
    outbox: Outbox[str] = Outbox()
    for item, priority in items:
        outbox.put(item, priority)
    return outbox


def test_highest_priority_leaves_first_and_of_equals_the_earliest() -> None:
    outbox = filled(("b", 0), ("first", 7), ("c", 0), ("last", -1), ("second", 7))
    outbox.close()
    assert list(outbox) == ["first", "second", "b", "c", "last"]


def test_what_comes_later_may_pass_what_waits() -> None:
    outbox = filled(("a", 1), ("b", 1))
    items = iter(outbox)
    assert next(items) == "a"
    outbox.put("urgent", 2)
    assert next(items) == "urgent"
    assert len(outbox) == 1


def test_close_lets_out_what_waits_and_nothing_after() -> None:
    outbox = filled(("a", 0))
    outbox.close()
    outbox.close()
    outbox.put("late")
    assert list(outbox) == ["a"]
    assert list(outbox) == []


def test_each_item_leaves_by_one_of_several_takers() -> None:
    outbox: Outbox[int] = Outbox()
    taken: list[list[int]] = [[], [], []]
    takers = [threading.Thread(target=lambda mine=mine: mine.extend(outbox)) for mine in taken]
    for taker in takers:
        taker.start()
    for number in range(300):
        outbox.put(number)
    outbox.close()
    for taker in takers:
        taker.join(PATIENCE)
    assert sorted(itertools.chain(*taken)) == list(range(300))


def full(window: int = 10) -> tuple[Outbox[str], list[str]]:
    """An outbox with one item of 10 bytes under way, and what it says when there is room."""
    told: list[str] = []
    outbox: Outbox[str] = Outbox(lambda: told.append("room"), window)
    outbox.put("item", nbytes=10)
    assert outbox.take() is not None
    return outbox, told


def test_no_more_than_the_window_is_under_way() -> None:
    outbox, _ = full(window=25)
    for _ in range(3):
        outbox.put("item", nbytes=10)
    assert outbox.take() is not None
    assert outbox.take() is None
    assert len(outbox) == 2


def test_a_late_message_overtakes_what_waits() -> None:
    outbox, _ = full()
    outbox.put("early", 1, 10)
    assert outbox.take() is None
    outbox.put("late", 2, 10)
    outbox.left(10)
    assert outbox.take() == "late"


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


def test_what_has_no_bytes_takes_no_room() -> None:
    outbox, _ = full()
    outbox.put("header")
    assert outbox.take() is not None


def test_room_is_told_only_where_something_waits() -> None:
    outbox, told = full()
    outbox.left(10)
    assert told == []
    outbox.put("item", nbytes=10)
    assert outbox.take() is not None
    outbox.put("item", nbytes=10)
    outbox.left(10)
    assert told == ["room"]


def test_at_the_end_all_goes_without_room() -> None:
    outbox, _ = full()
    outbox.put("item", nbytes=10)
    assert outbox.take(force=True) is not None


def test_idle_is_when_all_has_left() -> None:
    outbox, _ = full()
    idle = [outbox.idle]
    outbox.left(10)
    idle.append(outbox.idle)
    outbox.put("item", nbytes=10)
    idle.append(outbox.idle)
    assert idle == [False, True, False]


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

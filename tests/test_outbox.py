"""What waits for a wire leaves by priority, and only once."""

from __future__ import annotations

import itertools
import threading

from ps.transport.outbox import Outbox

PATIENCE = 10.0


def filled(*items: tuple[str, int]) -> Outbox[str]:
    outbox: Outbox[str] = Outbox()
    for item, priority in items:
        outbox.put(item, priority)
    return outbox


def test_highest_priority_leaves_first_and_of_equals_the_earliest():
    outbox = filled(("b", 0), ("first", 7), ("c", 0), ("last", -1), ("second", 7))
    outbox.close()
    assert list(outbox) == ["first", "second", "b", "c", "last"]


def test_what_comes_later_may_pass_what_waits():
    outbox = filled(("a", 1), ("b", 1))
    items = iter(outbox)
    assert next(items) == "a"
    outbox.put("urgent", 2)
    assert next(items) == "urgent"
    assert len(outbox) == 1


def test_close_lets_out_what_waits_and_nothing_after():
    outbox = filled(("a", 0))
    outbox.close()
    outbox.close()
    outbox.put("late")
    assert list(outbox) == ["a"]
    assert list(outbox) == []


def test_each_item_leaves_by_one_of_several_takers():
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

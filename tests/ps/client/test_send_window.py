from __future__ import annotations

from hubring.ps.client.send_window import BYTES, PATIENCE_SECONDS, SLICES, Lead

SMALL, LARGE = BYTES // 4, BYTES


def lead_of(count: int, nbytes: int, *, bounded: bool = True) -> Lead[int]:
    lead = Lead[int](bounded=bounded)
    for number in range(count):
        lead.put(number, 0, nbytes)
    return lead


def taken(lead: Lead[int], now: float) -> list[int]:
    found = []
    while (item := lead.take(now)) is not None:
        found.append(item)
    return found


def test_nothing_leaves_once_the_bound_has_no_answer() -> None:
    lead = lead_of(10, SMALL)
    assert taken(lead, 0.0) == [0, 1, 2, 3]
    lead.answered(SMALL, 0.05)
    assert taken(lead, 0.05) == [4]
    assert lead


def test_large_slices_are_bounded_by_their_number() -> None:
    assert len(taken(lead_of(10, LARGE), 0.0)) == SLICES


def test_a_small_one_among_large_ones_does_not_stop_them() -> None:
    lead = lead_of(4, LARGE)
    lead.put(4, 0, 1024)
    lead.put(5, 0, LARGE)
    assert taken(lead, 0.0) == [0, 1, 2]
    lead.answered(LARGE, 0.01)
    assert taken(lead, 0.01) == [3]
    lead.answered(LARGE, 0.02)
    assert taken(lead, 0.02) == [4, 5]


def test_an_urgent_one_overtakes_what_is_held_back() -> None:
    lead = lead_of(10, SMALL)
    taken(lead, 0.0)
    lead.put(99, 1, SMALL)
    lead.answered(SMALL, 0.05)
    assert taken(lead, 0.05) == [99]


def test_the_bound_doubles_while_no_answer_comes_and_is_back_with_the_first() -> None:
    lead = lead_of(20, SMALL)
    assert len(taken(lead, 0.0)) == 4
    assert lead.patience(0.25 * PATIENCE_SECONDS) == 0.75 * PATIENCE_SECONDS
    assert taken(lead, 0.99 * PATIENCE_SECONDS) == []
    assert len(taken(lead, 1.01 * PATIENCE_SECONDS)) == 4
    assert len(taken(lead, 2.01 * PATIENCE_SECONDS)) == 8
    lead.answered(SMALL, 2.02 * PATIENCE_SECONDS)
    assert taken(lead, 2.03 * PATIENCE_SECONDS) == []


def test_time_in_which_nothing_was_due_is_not_silence() -> None:
    assert len(taken(lead_of(10, SMALL), 1000.0)) == 4


def test_where_no_link_is_shared_nothing_is_held_back() -> None:
    lead = lead_of(10, LARGE, bounded=False)
    assert len(taken(lead, 0.0)) == 10
    assert not lead


def test_clearing_takes_out_what_waits_in_its_order() -> None:
    lead = lead_of(6, SMALL)
    taken(lead, 0.0)
    lead.put(99, 1, SMALL)
    assert lead.clear() == [99, 4, 5]
    assert not lead

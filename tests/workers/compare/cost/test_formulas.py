"""The formulas of the model of cost."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hubring.workers.compare.cost.model import formulas
from hubring.workers.compare.cost.model.constants import LINE_BYTES, PAYLOAD_BYTES, Constants, Wire
from hubring.workers.compare.cost.model.crossing import most_servers, overtaking, servers_needed
from hubring.workers.compare.cost.model.exchange_terms import (
    BURST_BYTES,
    SPREAD,
    goodput,
    seconds_a_byte,
    spread,
)
from hubring.workers.compare.cost.model.formulas import WHOLE, Shards, Task
from hubring.workers.compare.cost.model.slicing import cut
from hubring.workers.compare.experiment.setting import Link

MEBI = 1 << 20
GIGABIT = Link(rate=1e9)
GOODPUT = 125e6 * PAYLOAD_BYTES / LINE_BYTES
FREE = Wire(alpha=0.0, beta=0.0, cpu=0.0)
WEIGHTLESS = Constants(
    wires=dict.fromkeys(("shm", "zmq", "grpc", "gloo"), FREE),
    copy=0.0,
    reduce=0.0,
    apply={"sgd": 0.0},
    serve=0.0,
    cores=2,
)
"""A machine on which nothing but links takes time."""


def hub(task: Task, workers: int, servers: int, constants: Constants = WEIGHTLESS) -> float:
    way = formulas.hub(constants, task, workers, servers, "zmq", steps=True, shows=True)
    return way.lockstep(workers)


def ring(task: Task, workers: int, constants: Constants = WEIGHTLESS) -> float:
    return formulas.ring(constants, task, workers).alone


def fine(nbytes: int, link: Link = GIGABIT) -> Task:
    """So small slices that the first one's way does not count."""
    return Task(nbytes=nbytes, link=link, slice_bytes=nbytes // 10_000)


def test_a_link_brings_its_user_what_headers_leave() -> None:
    assert goodput(GIGABIT) == pytest.approx(119.55e6, rel=1e-3)
    assert goodput(None) == goodput(Link(latency=1e-3)) == inf


@pytest.mark.parametrize("workers", [2, 4, 8, 64])
def test_a_ring_moves_twice_the_model_but_for_a_part(workers: int) -> None:
    expected = 2 * (workers - 1) / workers * 100 * MEBI / GOODPUT
    assert ring(Task(nbytes=100 * MEBI, link=GIGABIT), workers) == pytest.approx(expected)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (4, 1), (4, 2), (4, 4), (4, 8), (8, 2)])
def test_a_hub_takes_what_its_busiest_link_takes(workers: int, servers: int) -> None:
    expected = max(1, workers / servers) * 100 * MEBI / GOODPUT
    assert hub(fine(100 * MEBI), workers, servers) == pytest.approx(expected, rel=2e-3)


def test_n_slices_take_the_time_of_one_more() -> None:
    task = Task(nbytes=40 * MEBI, link=GIGABIT, slice_bytes=MEBI)
    assert hub(task, 4, 1) == pytest.approx(41 / 40 * 4 * 40 * MEBI / GOODPUT)


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 16, 64])
def test_a_hub_wins_from_the_servers_on_that_the_formula_says(workers: int) -> None:
    task, needed = fine(100 * MEBI), servers_needed(workers)
    least, even = ring(task, workers), workers**2 / (2 * (workers - 1))
    for servers in range(1, workers + 1):
        if abs(servers - even) > 0.1 * even:  # where they are apart by more than a slice
            assert (hub(task, workers, servers) < least) == (needed is not None and servers >= needed)


@pytest.mark.parametrize(("workers", "servers"), [(1, None), (2, None), (3, 3), (4, 3), (8, 5), (64, 33)])
def test_the_formula_says_how_many_servers_beat_the_ring(workers: int, servers: int | None) -> None:
    assert servers_needed(workers) == servers


def test_workers_that_share_a_link_push_more_than_a_ring_passes() -> None:
    assert [servers_needed(16, sharing) for sharing in (1, 2, 8)] == [9, None, None]


@pytest.mark.parametrize("total", [4, 5, 7, 8, 11, 1000])
def test_more_servers_than_are_tried_make_no_link_s_load_less(total: int) -> None:
    def load(servers: int) -> float:
        return max(1, 4 * cut(total * 4 * MEBI, servers, 4 * MEBI).part)

    assert load(most_servers(4)) == load(10**6) == 1


def test_the_hub_overtakes_where_it_wins_with_that_many_servers_and_all_more() -> None:
    assert overtaking(lambda servers: 12 / servers, 3.0, 4) == 5
    assert overtaking(lambda servers: 3.0, 3.0, 4) is None
    assert overtaking(lambda servers: 2.0, 3.0, 4) == 1
    assert overtaking(lambda servers: 4.0 if servers == 5 else 2.0, 3.0, 4) == 6
    assert overtaking(lambda servers: 4.0 if servers == 8 else 2.0, 3.0, 4) is None


def test_latency_counts_twice_per_hop_around_the_ring_and_twice_to_a_hub() -> None:
    task = Task(nbytes=4, link=Link(latency=1e-3))
    assert ring(task, 8) == pytest.approx(28e-3)
    assert hub(task, 8, 1) == pytest.approx(2e-3)


def test_a_ring_hides_a_hop_s_latency_behind_the_other_segment() -> None:
    def late(latency: float, mebibytes: int = 8) -> float:
        task = Task(nbytes=mebibytes * MEBI, link=Link(rate=1e9, latency=latency))
        return ring(task, 4) - ring(replace(task, link=GIGABIT), 4)

    segment = MEBI / GOODPUT  # each of 4 ranks has 2 MiB, in two segments
    assert late(segment / 4) == pytest.approx(2 * segment / 2)  # there and back, in each pass
    assert late(segment / 2) == pytest.approx(2 * segment)
    assert late(2 * segment) == pytest.approx((6 * 3 + 2) * segment)
    # A segment has at most 1 MiB, and two are on their way at once.
    assert late(segment / 2, 16) == pytest.approx(2 * segment)
    assert late(2 * segment, 16) == pytest.approx((2 * 6 * 3 + 2) * segment)


@pytest.mark.parametrize(("passes", "rounds"), [(2, 6), (4, 12)])
def test_where_a_ring_only_waits_latency_is_what_limits_it(passes: int, rounds: int) -> None:
    task = Task(nbytes=4, link=Link(rate=1e9, latency=1e-3))
    way = formulas.ring(WEIGHTLESS, task, 4, Shards(passes=passes))
    assert way.rounds == pytest.approx(way.alone) == pytest.approx(rounds * 2e-3, rel=1e-4)
    assert formulas.ring(WEIGHTLESS, replace(task, nbytes=64 * MEBI), 4).rounds == 0.0


def test_a_broadcast_after_the_step_waits_once_for_its_receivers_and_for_each_level_of_its_tree() -> None:
    task = Task(nbytes=4, link=Link(latency=1e-3))
    ways = [formulas.ring(WEIGHTLESS, task, 4, each) for each in (WHOLE, Shards(broadcast=True))]
    assert ways[1].alone - ways[0].alone == pytest.approx(3e-3)


def test_a_gather_has_two_segments_of_any_size() -> None:
    task = Task(nbytes=256 * MEBI, link=Link(rate=1e10, latency=5e-3))
    gathers = formulas.ring(WEIGHTLESS, task, 4, Shards(passes=1, gathers=1)).alone
    half = 32 * MEBI / (10 * GOODPUT)
    assert half > 10e-3
    assert gathers == pytest.approx(6 * half + 10e-3)


def test_between_two_ranks_nothing_hides_latency() -> None:
    far, segment = Link(rate=1e9, latency=1e-3), MEBI / GOODPUT
    task = Task(nbytes=16 * MEBI, link=far)  # each of 2 ranks has 8 MiB, in eight segments
    assert 2 * segment > 2e-3
    assert ring(task, 2) - ring(replace(task, link=GIGABIT), 2) == pytest.approx(2 * 4 * 2e-3)


def test_an_emulated_ring_s_bucket_fills_while_it_computes_or_waits_for_latency() -> None:
    def step(latency: float, nbytes: int, pause: float = 0.0) -> float:
        task = Task(nbytes=nbytes, link=Link(rate=1e8, latency=latency), together=True, pause=pause)
        return pause + ring(task, 4)

    burst, large = BURST_BYTES * 8 / 1e8, 64 * MEBI
    link = 1.5 * large / (GOODPUT / 10)
    assert step(0.0, large) == pytest.approx(link)
    assert step(0.0, large, pause=burst / 2) == pytest.approx(link)  # no link carries more than its rate
    assert step(0.0, large, pause=3 * burst) == pytest.approx(link + 2 * burst)
    assert step(burst / 4, large) == pytest.approx(link)  # it fills in each of two passes
    assert step(burst / 4, large, pause=burst) == pytest.approx(link + burst / 2)
    assert step(burst, large) == pytest.approx(link + 2 * burst)
    assert step(burst, BURST_BYTES) == pytest.approx(6 * 2 * burst)  # only latency counts


def test_distant_workers_finish_one_after_another_while_their_connections_accelerate() -> None:
    near, far = (Link(rate=1e8, latency=latency) for latency in (0.0, 5e-3))
    assert spread(500_000, near) == spread(500_000, None) == spread(1_000, far) == 0.0
    assert spread(500_000, far) == pytest.approx(SPREAD)
    assert 0 < spread(100 * MEBI, far) < 0.1 * SPREAD
    task = Task(nbytes=500_000, link=far)
    ahead = formulas.hub(WEIGHTLESS, task, 4, 1, "zmq", steps=True, shows=True)
    together = replace(ahead, spread=0.0)
    # Of one slice's two ways, in and out, the way in is shorter.
    assert ahead.lockstep(4) / together.lockstep(4) == pytest.approx(1 - SPREAD * 3 / 4 / 2, rel=0.05)


def test_a_window_limits_what_a_long_line_carries() -> None:
    wire = replace(FREE, window=1e6)
    assert seconds_a_byte(wire, Link(latency=5e-3)) == pytest.approx(10e-3 / 1e6)
    assert seconds_a_byte(wire, None) == 0.0


def test_hosts_that_share_cores_take_the_processor_time_of_all() -> None:
    wire = replace(FREE, cpu=1e-9)
    busy = replace(WEIGHTLESS, wires={**WEIGHTLESS.wires, "zmq": wire, "gloo": wire})
    task = Task(nbytes=100 * MEBI, together=True)
    assert hub(task, 4, 1, busy) == pytest.approx(4 * 2 * 100 * MEBI * 1e-9 / 2)
    assert ring(task, 4, busy) == pytest.approx(2 * 3 * 100 * MEBI * 1e-9 / 2)
    assert hub(replace(task, together=False), 4, 1, busy) == 0.0


def test_lines_at_once_are_the_transport_s() -> None:
    from hubring.ps.transport.zmq.socket import IO_THREADS

    assert formulas.SERVER_LINES["zmq"] == IO_THREADS


def test_a_slow_wire_keeps_the_first_size() -> None:
    def count(rate: float) -> float:
        task = Task(nbytes=40 * MEBI, link=Link(rate=rate))
        return formulas.hub(WEIGHTLESS, task, 4, 4, "zmq", steps=True, shows=True).slices

    assert count(1e9) == 3
    assert count(100e9) == 10


@given(
    workers=st.integers(1, 200),
    servers=st.integers(1, 200),
    nbytes=st.integers(1, 10**9),
    rate=st.floats(1e6, 1e11),
)
@settings(max_examples=30, deadline=None)
def test_more_servers_are_never_slower(workers: int, servers: int, nbytes: int, rate: float) -> None:
    task = Task(nbytes=nbytes, link=Link(rate=rate), slice_bytes=4 * MEBI)
    assert hub(task, workers, servers + 1) <= hub(task, workers, servers) * (1 + 1e-9)


def test_colocated_shards_carry_what_a_ring_carries() -> None:
    task = Task(nbytes=100 * MEBI, link=GIGABIT)
    colocated = formulas.colocated(WEIGHTLESS, task, 4, "zmq", steps=True)
    assert colocated.lockstep(4) == pytest.approx(ring(task, 4))

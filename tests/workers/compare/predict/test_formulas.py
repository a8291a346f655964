"""The formulas of the cost model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hubring.ps.transport.zmq.socket import IO_THREADS
from hubring.workers.compare.plan.setting import LINE_BYTES, PAYLOAD_BYTES, Link
from hubring.workers.compare.predict.calibrations import Constants, WireCosts
from hubring.workers.compare.predict.exchange_terms import (
    SPREAD,
    ExchangeTask,
    overtaking,
    servers_needed,
    spread,
)
from hubring.workers.compare.predict.formulas import SERVER_LINES, ExchangeCosts
from hubring.workers.compare.predict.prediction import predict
from tests.support.compare.calibration import CONSTANTS, JOB, LINKED

MEBI = 1 << 20
GIGABIT = Link(rate=1e9)
GOODPUT = 125e6 * PAYLOAD_BYTES / LINE_BYTES
FREE = WireCosts(alpha=0.0, beta=0.0, cpu=0.0)
WEIGHTLESS = Constants(
    wires=dict.fromkeys(("shm", "zmq", "grpc", "gloo"), FREE),
    copy=0.0,
    reduce=0.0,
    apply={"sgd": 0.0},
    serve=0.0,
    cores=2,
)
"""A machine on which nothing but links takes time."""


def hub(task: ExchangeTask, workers: int, servers: int, constants: Constants = WEIGHTLESS) -> float:
    way = ExchangeCosts(constants, task, workers).hub(servers, "zmq", steps=True, shows=True)
    return way.lockstep(workers)


def ring(task: ExchangeTask, workers: int, constants: Constants = WEIGHTLESS) -> float:
    return ExchangeCosts(constants, task, workers).ring().alone


def fine(nbytes: int, link: Link = GIGABIT) -> ExchangeTask:
    """So small slices that the first one's way does not count."""
    return ExchangeTask(nbytes=nbytes, link=link, slice_bytes=nbytes // 10_000)


def test_lines_at_once_are_the_transport_s() -> None:
    assert SERVER_LINES["zmq"] == IO_THREADS


@pytest.mark.parametrize("workers", [2, 4, 8, 64])
def test_a_ring_moves_twice_the_model_but_for_a_part(workers: int) -> None:
    expected = 2 * (workers - 1) / workers * 100 * MEBI / GOODPUT
    assert ring(ExchangeTask(nbytes=100 * MEBI, link=GIGABIT), workers) == pytest.approx(expected)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (4, 1), (4, 2), (4, 4), (4, 8), (8, 2)])
def test_a_hub_takes_what_its_busiest_link_takes(workers: int, servers: int) -> None:
    expected = max(1, workers / servers) * 100 * MEBI / GOODPUT
    assert hub(fine(100 * MEBI), workers, servers) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 16, 64])
def test_a_hub_wins_from_the_servers_on_that_the_formula_says(workers: int) -> None:
    task, needed = fine(100 * MEBI), servers_needed(workers)
    least, even = ring(task, workers), workers**2 / (2 * (workers - 1))
    for servers in range(1, workers + 1):
        if abs(servers - even) > 0.1 * even:  # where they are apart by more than a slice
            assert (hub(task, workers, servers) < least) == (needed is not None and servers >= needed)


def test_the_hub_overtakes_where_it_wins_with_that_many_servers_and_all_more() -> None:
    assert overtaking(lambda servers: 12 / servers, 3.0, 4) == 5
    assert overtaking(lambda servers: 3.0, 3.0, 4) is None
    assert overtaking(lambda servers: 2.0, 3.0, 4) == 1
    assert overtaking(lambda servers: 4.0 if servers == 5 else 2.0, 3.0, 4) == 6
    assert overtaking(lambda servers: 4.0 if servers == 8 else 2.0, 3.0, 4) is None


def test_distant_workers_finish_one_after_another_while_their_connections_accelerate() -> None:
    near, far = (Link(rate=1e8, latency=latency) for latency in (0.0, 5e-3))
    assert spread(500_000, near) == spread(500_000, Link()) == spread(1_000, far) == 0.0
    assert spread(500_000, far) == pytest.approx(SPREAD)
    assert 0 < spread(100 * MEBI, far) < 0.1 * SPREAD


def test_hosts_that_share_cores_take_the_processor_time_of_all() -> None:
    wire = replace(FREE, cpu=1e-9)
    busy = replace(WEIGHTLESS, wires={**WEIGHTLESS.wires, "zmq": wire, "gloo": wire})
    task = ExchangeTask(nbytes=100 * MEBI, together=True)
    assert hub(task, 4, 1, busy) == pytest.approx(4 * 2 * 100 * MEBI * 1e-9 / 2)
    assert ring(task, 4, busy) == pytest.approx(2 * 3 * 100 * MEBI * 1e-9 / 2)
    assert hub(replace(task, together=False), 4, 1, busy) == 0.0


@given(
    workers=st.integers(1, 200),
    servers=st.integers(1, 200),
    nbytes=st.integers(1, 10**9),
    rate=st.floats(1e6, 1e11),
)
@settings(max_examples=30, deadline=None)
def test_more_servers_are_never_slower(workers: int, servers: int, nbytes: int, rate: float) -> None:
    task = ExchangeTask(nbytes=nbytes, link=Link(rate=rate), slice_bytes=4 * MEBI)
    assert hub(task, workers, servers + 1) <= hub(task, workers, servers) * (1 + 1e-9)


def colocated(task: ExchangeTask, workers: int) -> float:
    return ExchangeCosts(WEIGHTLESS, task, workers).colocated("zmq", steps=True).lockstep(workers)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_colocated_shards_carry_what_a_ring_carries(workers: int) -> None:
    task = fine(100 * MEBI)
    assert colocated(task, workers) == pytest.approx(ring(task, workers), rel=3e-3)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_a_model_of_one_slice_passes_the_link_of_its_only_colocated_shard_twice(workers: int) -> None:
    # The other workers push it there, and only then does it return to each of them.
    task = ExchangeTask(nbytes=MEBI, link=GIGABIT)
    assert colocated(task, workers) == pytest.approx(2 * (workers - 1) * MEBI / GOODPUT)


def test_shards_with_unequal_parts_are_as_slow_as_the_largest() -> None:
    task = ExchangeTask(nbytes=12 * MEBI, link=GIGABIT, slice_bytes=4 * MEBI)  # three slices for two hosts
    # Host 0 gets 8 MiB from the other worker and sends it 8, and its own worker pushes and pulls 4; the last
    # slice of 4 leaves once it is in.
    assert colocated(task, 2) == pytest.approx(12 * MEBI / GOODPUT, rel=1e-6)


def test_the_measured_slowdown_of_a_switch_that_drops_is_predicted() -> None:
    def step(row: str, buffer: float | None) -> float:
        job = replace(JOB, compute=0.0, nbytes=MEBI, buffer=buffer)
        return predict(CONSTANTS, row, replace(LINKED, link=Link(rate=2e8)), job).step_seconds

    assert step("hub-bsp", 2.5e6) / step("hub-bsp", None) == pytest.approx(1.12, abs=0.05)
    assert step("hub-bsp", 4 * MEBI) == step("hub-bsp", None), "the gradients of all four fit"
    assert step("ring", 3e4) == step("ring", None), "in a ring each host receives from one other"


@pytest.mark.parametrize(
    ("workers", "rate", "nbytes", "milliseconds"),
    [
        (2, None, 1_024, 20.9),
        (8, 1e8, 1_024, 154),
        (8, 1e8, 542_280, 155),
        (2, 1e9, 16 * MEBI, 218),
        (4, 1e9, 16 * MEBI, 280),
    ],
)
def test_a_ring_with_latency_takes_what_was_measured(
    workers: int, rate: float | None, nbytes: int, milliseconds: float
) -> None:
    # ps/MEASUREMENTS.md: one allreduce of Gloo behind emulated links, one way 5 ms.
    task = ExchangeTask(nbytes=nbytes, link=Link(rate=rate, latency=5e-3), together=True)
    gloo = replace(WEIGHTLESS, wires={**WEIGHTLESS.wires, "gloo": replace(FREE, alpha=6e-4)})
    assert 1e3 * ring(task, workers, gloo) == pytest.approx(milliseconds, rel=0.17)
    assert hub(ExchangeTask(nbytes=4, link=Link(latency=5e-3)), workers, 1) == pytest.approx(10e-3)

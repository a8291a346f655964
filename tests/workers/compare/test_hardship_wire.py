"""A wire that takes its time, by a clock of the test's own."""

from __future__ import annotations

from itertools import pairwise

from hubring.workers.compare.experiment.setting import Link
from hubring.workers.compare.hardship.slow_wire import Wire

FRAMES = [bytes([number]) * 10 for number in range(100)]


def journey(link: Link, gap: float, seed: str = "port0") -> list[float]:
    """When frames come out that go in with a gap between them; asserts that they keep their order."""
    wire, came, times = Wire(link, seed), list[bytes](), list[float]()
    for number, frame in enumerate(FRAMES):
        wire.put(frame, number * gap)
    while wire.nbytes:
        now = wire.due
        out = list(wire.take(now))
        times += [now] * len(out)
        came += out
    assert came == FRAMES
    return times


def test_a_frame_comes_out_after_the_latency_and_not_before() -> None:
    wire = Wire(Link(latency=0.5), "port0")
    wire.put(b"frame", 1.0)
    assert (wire.due, wire.nbytes) == (1.5, 5)
    assert list(wire.take(1.4999)) == []
    assert list(wire.take(1.5)) == [b"frame"]
    assert (wire.due, wire.nbytes) == (float("inf"), 0)


def test_without_jitter_frames_keep_their_distance() -> None:
    assert journey(Link(latency=0.5), gap=0.125) == [0.5 + 0.125 * number for number in range(len(FRAMES))]


def test_jitter_stays_in_its_bounds_and_varies() -> None:
    gap = 1.0
    taken = [out - gap * number for number, out in enumerate(journey(Link(latency=0.5, jitter=0.25), gap))]
    assert 0.25 <= min(taken) < 0.3
    assert 0.7 < max(taken) <= 0.75


def test_jitter_never_lets_a_frame_pass_another() -> None:
    times = journey(Link(latency=0.5, jitter=0.5), gap=0.001)
    assert all(before <= after for before, after in pairwise(times))


def test_the_same_seed_brings_the_same_delays() -> None:
    link = Link(latency=0.5, jitter=0.25)
    assert journey(link, 0.1) == journey(link, 0.1)
    assert journey(link, 0.1) != journey(link, 0.1, seed="port1")

"""The command lines of a row's programs, and the wire between their hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hubring.workers.compare.plan.experiment import LinkTable
from hubring.workers.compare.plan.row import EVERY
from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.plan.setting import Link
from hubring.workers.compare.run.programs import Programs
from hubring.workers.compare.run.relay import SlowWire
from hubring.workers.compare.run.site import LocalHosts
from tests.support.compare.replayed import experiment


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("--batch={batch}", "--batch=8"),
        *((word, word) for word in ("${batch}", "{{batch}}", "{}", "{0}", '{"a": 1}')),
    ],
)
def test_a_name_in_single_braces_is_filled_in_and_no_other(tmp_path: Path, word: str, told: str) -> None:
    (tmp_path / "a.py").touch()
    script = {"job": None, "script": tmp_path / "a.py", "metric": "loss", "rows": ("local",), "seeds": (0,)}
    plan = experiment(**script, batch=8, arguments=("{batch}", word))
    (way,) = plan.ways
    programs = Programs(plan, PlannedRun(plan.settings[0], way, 0), tmp_path, LocalHosts())
    assert programs.worker(0, None)[-2:] == ["8", told]


@pytest.mark.parametrize("row", ["local", "ring", "hub-bsp", "hub-colocated"])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_workers_of_all_rows_have_gpus_or_those_of_none(row: str, backend: str) -> None:
    plan = experiment(rows=(row,), backend=backend)
    programs = Programs(plan, PlannedRun(plan.settings[0], plan.ways[0], seed=0), Path("run"), LocalHosts())
    words = programs.worker(0, None if row == "local" else "hub:5555")
    assert words[words.index("--accelerator") + 1] == ("cuda" if backend == "nccl" else "cpu")


@pytest.mark.parametrize(
    ("row", "asked", "wire"),
    [
        ("hub-bsp", {}, "auto"),
        ("hub-bsp", {"transport": "grpc"}, "grpc"),
        ("hub-bsp", {"link": LinkTable(rate=(1e9,))}, "zmq"),
        ("hub-shm", {"transport": "grpc"}, "shm"),
        ("hub-zmq", {}, "zmq"),
        ("hub-grpc", {"link": LinkTable(rate=(1e9,))}, "grpc"),
    ],
)
def test_a_hub_row_goes_by_its_own_wire_or_by_the_experiments(
    row: str, asked: dict[str, object], wire: str
) -> None:
    plan = experiment(rows=(row,), **asked)
    programs = Programs(plan, PlannedRun(plan.settings[0], EVERY[row], seed=0), Path("run"), LocalHosts())
    words = programs.worker(0, "hub:5555")
    assert "--backend" not in words, "that is the ring's"
    assert [words[place + 1] for place, word in enumerate(words) if word == "--transport"] == [wire]


@pytest.mark.parametrize(
    ("row", "backend", "given"),
    [("ring", "gloo", []), ("ring-gloo", "gloo", ["gloo"]), ("ring", "nccl", ["nccl"])],
)
def test_a_ring_chooses_how_it_exchanges_unless_its_row_or_nccl_says_it(
    row: str, backend: str, given: list[str]
) -> None:
    plan = experiment(rows=(row,), backend=backend)
    programs = Programs(plan, PlannedRun(plan.settings[0], EVERY[row], seed=0), Path("run"), LocalHosts())
    words = programs.worker(0, "hub:5555")
    assert [words[place + 1] for place, word in enumerate(words) if word == "--backend"] == given


def test_a_frame_leaves_after_the_latency_and_never_before_an_earlier_one() -> None:
    wire = SlowWire(Link(latency=0.5), "port0")
    wire.put(b"one", 1.0)
    wire.put(b"more", 1.125)
    assert (wire.due, wire.nbytes) == (1.5, 7)
    assert list(wire.take(1.4999)) == []
    assert (list(wire.take(1.5)), wire.due, wire.nbytes) == ([b"one"], 1.625, 4)
    assert (list(wire.take(9.0)), wire.due, wire.nbytes) == ([b"more"], float("inf"), 0)


def journey(seed: str, gap: float) -> list[float]:
    """When frames come out that go in with a gap between them; asserts that they keep their order."""
    frames = [bytes([number]) * 10 for number in range(100)]
    wire, came, times = SlowWire(Link(latency=0.5, jitter=0.25), seed), list[bytes](), list[float]()
    for number, frame in enumerate(frames):
        wire.put(frame, number * gap)
    while wire.nbytes:
        now = wire.due
        out = list(wire.take(now))
        times += [now] * len(out)
        came += out
    assert came == frames
    return times


def test_jitter_varies_within_its_bounds_by_the_seed_and_lets_no_frame_pass_another() -> None:
    times = journey("port0", gap=1.0)
    taken = [out - number for number, out in enumerate(times)]
    assert 0.25 <= min(taken) < 0.3
    assert 0.7 < max(taken) <= 0.75
    assert times == journey("port0", gap=1.0) != journey("port1", gap=1.0)
    close = journey("port0", gap=0.001)
    assert close == sorted(close)

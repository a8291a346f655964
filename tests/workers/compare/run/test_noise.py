"""Disturbances of a run are separated from its own load, on each machine by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.run import noise
from hubring.workers.compare.run.noise import BusyClock, ProcessCounts, RunNoise, of_machine
from hubring.workers.compare.run.runner import Runner
from hubring.workers.compare.run.site import ThisMachine
from hubring.workers.compare.show.page import page
from tests.support.compare.replayed import SEEDS, Replayed, compared, experiment, paced
from tests.support.compare.results import read as findings_of
from tests.support.pages.html_tree import html_tree

CALM = (0.1, 0.1)


def clocked(megahertz: Callable[[PlannedRun], Sequence[RunNoise]]) -> dict[str, Any]:
    """Returns rows of which the ring takes twice as long, with this noise."""
    trainer = paced({"ring": 0.02})
    trainer.noises = megahertz
    return {"trainer": trainer, "rows": ("ring", "hub-bsp"), "seeds": SEEDS}


def test_a_row_that_keeps_more_cores_busy_is_not_disturbed_by_its_clock_rate(tmp_path: Path) -> None:
    rate = {"ring": 3500.0, "hub-bsp": 3200.0}
    found = compared(tmp_path, **clocked(lambda run: [RunNoise(CALM, 0.01, megahertz=rate[run.row.name])]))
    assert found["noise"]["quiet"]
    assert "the hub is 2.00 times as fast as the ring" in found["answer"]


def test_a_run_with_a_lower_clock_rate_than_others_of_its_row_is_disturbed(tmp_path: Path) -> None:
    def slowed(run: PlannedRun) -> list[RunNoise]:
        return [RunNoise(CALM, 0.01, megahertz=3200.0 if run.label == "n2 k1 ring seed1" else 3500.0)]

    found = compared(tmp_path, **clocked(slowed))
    assert "the processor ran at 91% of its rate in equal runs in 1 of 3 runs of ring" in found["answer"]


def test_idle_processors_do_not_count_for_the_clock_rate() -> None:
    clocks = []
    for busy in (8, 10):
        clock = BusyClock(dict.fromkeys(range(64), 100))
        rates = {processor: 3500.0 if processor < busy else 800.0 for processor in range(64)}
        clock.read({processor: 200 if processor < busy else 100 for processor in range(64)}, rates)
        clocks.append(clock.mean)
    assert clocks == [3500.0, 3500.0]
    assert BusyClock({}).mean is None


def test_the_kernel_s_files_are_read_by_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat, info = tmp_path / "stat", tmp_path / "cpuinfo"
    stat.write_text(
        "cpu 3 1 2 9 9 50 60 4 0 0\ncpu0 1 0 1 5 5 20 30 0 0 0\ncpu7 2 1 1 4 4 30 30 4 0 0\nintr 1\n"
    )
    info.write_text("processor\t: 0\nflags\t: a\ncpu MHz\t\t: 800.5\n\nprocessor\t: 7\ncpu MHz\t\t: 3500.0\n")
    monkeypatch.setattr(noise, "_STAT", stat)
    monkeypatch.setattr(noise, "_CPUINFO", info)
    assert noise._busy_by_processor() == {0: 2, 7: 8}
    assert noise._megahertz() == {0: 800.5, 7: 3500.0}
    assert noise._counts()[0] == pytest.approx(0.1)  # without interrupts, which are of our own packets too


@pytest.mark.parametrize(
    ("cores", "own", "foreign", "said"),
    [
        (64, 2.0, 6.0, "other programs used 6.0 cores and the run 2.0"),
        (64, 0.5, 0.5, "other programs used 0.5 cores and the run 0.5"),  # on the only core that it may use
        (64, 60.0, 4.0, ""),
        (2, 1.8, 0.1, ""),
        (2, 0.05, 0.09, ""),  # a run that sleeps
    ],
)
def test_other_programs_are_related_to_the_cores_that_the_run_used(
    cores: int, own: float, foreign: float, said: str
) -> None:
    seconds = 20.0
    sample = ProcessCounts(CALM, cores * seconds, (own + foreign) * seconds, own * seconds, seconds)
    assert of_machine([sample]).disturbance() == said


def test_a_machine_is_compared_with_its_own_other_runs(tmp_path: Path) -> None:
    def slowed(run: PlannedRun) -> list[RunNoise]:
        slow = run.label == "n2 k1 hub-bsp seed2"
        here = RunNoise(CALM, 0.02, megahertz=3500.0, cores=(3.0, 0.08), machine="a")
        return [
            here,
            RunNoise(CALM, 0.01, megahertz=1000.0 if slow else 2000.0, cores=(3.0, 0.04), machine="b"),
        ]

    found = compared(tmp_path, **clocked(slowed))
    assert (
        "1 of 9 runs were disturbed: in n2 k1 hub-bsp seed2, the processor ran at 50%" in found["verdict"][-1]
    )
    assert "of its rate in equal runs on b" in found["verdict"][-1]


def test_runs_on_gpus_say_that_these_were_not_watched(tmp_path: Path) -> None:
    results = {"ring": {"usage": {"gpu_bytes": 1 << 30}}}
    found = compared(tmp_path / "gpu", Replayed(results=results), rows=("ring", "hub-bsp"))
    assert found["noise"]["quiet"]
    assert found["noise"]["gpus"]
    assert any(text.startswith("GPUs were not watched") for text in found["verdict"])
    assert "Nothing disturbed the runs, as far as" in html_tree(page(findings_of(found))).text
    plain = compared(tmp_path / "cpu", rows=("ring", "hub-bsp"))
    assert not plain["noise"]["gpus"]
    assert not any("GPU" in text for text in plain["verdict"])


class ListenedSite(ThisMachine):
    """Hears this noise."""

    def __init__(self, *heard: RunNoise) -> None:
        self.heard = heard

    def listen(self) -> Callable[[], Sequence[RunNoise]]:
        return lambda: self.heard


def test_a_machine_is_busy_if_something_disturbs_it_before_the_first_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    loaded = RunNoise((9.0, 9.0), 0.0, cores=(0.0, 0.0), machine="a")  # by what has ended
    robbed = RunNoise((0.0, 0.0), 0.0, stolen=0.5, machine="b")
    assert Runner(experiment(), site=ListenedSite(loaded, robbed)).busy() == ["b"]

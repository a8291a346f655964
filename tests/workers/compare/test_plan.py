"""Settings are conditions of a run; runs come in a fair order, and none twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from msgspec import json

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.plan.experiment import FaultTable, LinkTable
from hubring.workers.compare.plan.row import EVERY, ROWS
from hubring.workers.compare.plan.run_order import AGAIN, again, runs
from hubring.workers.compare.plan.setting import Fault, Link, Setting
from hubring.workers.runtime.slowdown import Straggler
from tests.support.compare.replayed import experiment


def test_every_row_runs_once_with_each_seed_and_the_hub_twice() -> None:
    found = runs(experiment())
    counts = Counter((run.row.name, run.seed) for run in found)
    assert [counts.pop(("hub-bsp", seed)) for seed in (0, 1)] == [2, 2]
    assert set(counts.values()) == {1}
    assert len(counts) == 3 * 2


def test_seeds_follow_each_other_and_rows_take_turns_in_going_first() -> None:
    found = [run for run in runs(experiment(seeds=(5, 6, 7, 8))) if not run.turn]
    assert [run.seed for run in found] == [5] * 4 + [6] * 4 + [7] * 4 + [8] * 4
    assert [run.row.name for run in found[::4]] == ["local", "ring", "hub-bsp", "hub-asp"]


def test_repeats_come_after_all_seeds_and_need_no_second_run_of_the_hub() -> None:
    found = runs(experiment(repeats=2))
    assert [run.turn for run in found] == [0] * 4 + [1] + [0] * 4 + [1] * 7
    assert len(set(found)) == len(found) == 16


def test_settings_are_interleaved_too_and_change_direction() -> None:
    found = runs(experiment(rows=("hub-bsp",), servers=(1, 2, 4)))
    assert [run.setting.servers for run in found if not run.turn] == [1, 2, 4, 4, 2, 1]


def test_a_row_is_not_run_again_for_a_setting_that_does_not_affect_it() -> None:
    found = runs(experiment(rows=("local", "ring", "hub-bsp"), seeds=(0,), servers=(1, 2), link=LINK))
    assert Counter(run.row.name for run in found) == {"local": 1, "ring": 2, "hub-bsp": 5}


LINK = LinkTable(rate=(1e9, 2e8))


def test_a_lone_process_meets_no_network_and_no_loss_and_its_own_host_only() -> None:
    setting = Setting(workers=4, servers=2, link=Link(rate=1e9), fault=Fault(rank=1, step=3), compute=0.1)
    assert ROWS["local"].meets(setting) == Setting(workers=4, compute=0.1)
    slow = Straggler(kind="constant", seconds=1.0, ranks=(1,))
    assert ROWS["local"].meets(Setting(workers=4, straggler=slow)) == Setting(workers=4)
    everybody = Straggler(kind="constant", seconds=1.0)
    assert ROWS["local"].meets(Setting(workers=4, straggler=everybody)).straggler == everybody


def test_labels_tell_all_runs_apart() -> None:
    found = runs(experiment(servers=(1, 2), workers=(2, 4), link=LINK, repeats=2))
    assert len({run.label for run in found}) == len(found)
    assert found[0].label == "n2 k1 local seed0"


def test_a_hub_that_loses_a_worker_is_not_expected_to_repeat_itself() -> None:
    assert again(experiment(fault=FaultTable(rank=1, step=9))) == []
    pairs = again(experiment())
    assert [[run.row.name for run in pair] for pair in pairs] == [[AGAIN, AGAIN]] * 2


def test_without_hub_bsp_another_row_with_several_workers_runs_twice() -> None:
    pairs = again(experiment(rows=("local", "hub-asp", "ring")))
    assert [[(run.row.name, run.seed, run.turn) for run in pair] for pair in pairs] == [
        [("hub-asp", seed, turn) for turn in (0, 1)] for seed in (0, 1)
    ]


@pytest.mark.parametrize(
    ("row", "server", "worker"),
    [
        ("local", None, ""),
        ("ddp", None, ""),
        ("ring", "", "--topology ring"),
        ("ring-heals", "", "--topology ring --min-workers 1"),
        ("ring-int8", "", "--topology ring --compress int8"),
        ("hub-ssp", "--mode ssp --staleness 2", ""),
        ("hub-aggregate", "--mode bsp", "--aggregate"),
        ("hub-backup", "--mode backup --backup 1", ""),
        ("hub-standby", "--mode bsp --standby 1", ""),
        ("hub-colocated", "--mode bsp --colocate", ""),
        ("hub-local", "--mode bsp", "--local"),
        ("hub-zmq", "--mode bsp", "--transport zmq"),
        ("hub-powersgd:4", "--mode bsp", "--compress powersgd:4 --aggregate"),
    ],
)
def test_the_flags_of_the_programs_follow_from_the_row(row: str, server: str | None, worker: str) -> None:
    told = EVERY[row].server
    assert (None if told is None else " ".join(told)) == server
    assert " ".join(EVERY[row].worker) == worker


HARD = Setting(
    workers=4,
    servers=2,
    link=Link(rate=2e8, latency=5e-3, jitter=1e-3),
    straggler=Straggler(kind="pareto", seconds=0.02, ranks=(1, 2)),
    fault=Fault(rank=3, step=50),
    compute=0.05,
)


def test_a_key_says_what_differs_from_a_plain_machine() -> None:
    assert Setting(workers=2).key == "n2 k1"
    assert Setting(workers=4, link=Link(rate=1e9, sharing=2)).key == "n4 k1 1000mbit x2"
    assert HARD.key == "n4 k2 200mbit 5ms +-1ms pareto20ms@1,2 kill3@50 compute50ms"


def test_a_setting_is_the_same_after_json() -> None:
    assert json.decode(json.encode(HARD), type=Setting) == HARD
    assert json.decode(json.encode(Setting(workers=1)), type=Setting) == Setting(workers=1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Link(rate=0.0), "rate 0 bit/s; expected a rate above 0"),
        (lambda: Link(latency=0.001, jitter=0.002), "expected a jitter from 0 to the latency"),
        (lambda: Straggler(kind="pareto", seconds=1.0, shape=1.0), "a shape above 1"),
        (lambda: Straggler(kind="often", seconds=1.0), "expected one of constant, pareto, host"),  # type: ignore[arg-type]  # what is refused
        (lambda: Setting(workers=0), "expected at least 1 of each"),
        (lambda: Setting(workers=2, fault=Fault(rank=2, step=0)), "from 0 to 1"),
        (lambda: Setting(workers=2, straggler=Straggler(kind="host", seconds=1.0, ranks=(4,))), "rank 4"),
    ],
)
def test_an_invalid_setting_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()

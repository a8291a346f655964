"""Settings of an experiment."""

from __future__ import annotations

import pytest
from msgspec import json

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.experiment.setting import Fault, Link, Setting
from hubring.workers.slowdown.straggler import Straggler

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
    assert HARD.key == "n4 k2 200mbit 5ms +-1ms pareto20ms@1,2 kill3@50 compute50ms"


def test_a_setting_is_the_same_after_json() -> None:
    assert json.decode(json.encode(HARD), type=Setting) == HARD
    assert json.decode(json.encode(Setting(workers=1)), type=Setting) == Setting(workers=1)


def test_time_that_was_slept_is_called_emulated() -> None:
    assert HARD.emulated
    assert not Setting(workers=2, link=Link(rate=1e9)).emulated


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Link(rate=0.0), "rate 0 bit/s; expected a rate above 0"),
        (lambda: Link(latency=0.001, jitter=0.002), "expected a jitter from 0 to the latency"),
        (lambda: Straggler(kind="pareto", seconds=1.0, shape=1.0), "a shape above 1"),
        (lambda: Straggler(kind="often", seconds=1.0), "expected one of constant, pareto, host"),  # type: ignore[arg-type]
        (lambda: Setting(workers=0), "expected at least 1 of each"),
        (lambda: Setting(workers=2, fault=Fault(rank=2, step=0)), "from 0 to 1"),
        (lambda: Setting(workers=2, straggler=Straggler(kind="host", seconds=1.0, ranks=(4,))), "rank 4"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()  # type: ignore[operator]

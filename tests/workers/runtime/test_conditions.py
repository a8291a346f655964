"""A worker records under which conditions it steps."""

from __future__ import annotations

import _thread
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hubring.workers.runtime.conditions import DELAYS, EXCHANGE, ConditionWatch
from hubring.workers.runtime.slowdown import Slowdown, SlowdownSettings, Straggler


@pytest.fixture
def watch() -> Iterator[ConditionWatch]:
    before = time.sleep
    found = ConditionWatch()
    yield found
    found.close()
    assert time.sleep is before


def test_a_flag_that_changes_during_training_has_all_its_values(
    watch: ConditionWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch.step_completed(0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        watch.step_completed(0)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    found = watch.report(None, None, ahead=False)
    assert str(found["threads"]).endswith(", 7")
    assert found["torch.backends.cuda.matmul.fp32_precision"] == "none, tf32"
    assert found["default dtype"] == "float32"
    assert (found[DELAYS], found[EXCHANGE]) == ("none", "ends in its step")


def test_sleeps_and_evaluations_count_between_the_first_step_and_the_last(watch: ConditionWatch) -> None:
    for step in range(3):
        time.sleep(0.004)
        watch.step_completed(10 + 3 * step)
    time.sleep(0.004)
    found = watch.report(None, None, ahead=True)
    assert found["ms in time.sleep() per step"] == pytest.approx(4.0)
    assert found["evaluations per step"] == 3.0
    assert found[EXCHANGE] == "may end in the next step"


def test_injected_delays_are_no_sleeps_of_the_script(watch: ConditionWatch) -> None:
    slow = Slowdown(SlowdownSettings(Straggler(kind="constant", seconds=0.01), 0.02), 0, lambda: 0.0)
    parameter = torch.nn.Parameter(torch.ones(2))
    slow.watch([parameter])
    for step in range(2):
        slow.begin(step)
        parameter.sum().backward()
        watch.step_completed(0)
    found = watch.report(slow, None, ahead=False)
    assert slow.seconds > 0
    assert found["ms in time.sleep() per step"] == 0.0
    assert found[DELAYS] == "constant10ms compute20ms"


def test_other_processes_and_threads_of_the_script_sleep(
    watch: ConditionWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    # So a process that is spawned finds its target, `time.sleep`, by name.
    assert getattr(sys.modules[time.sleep.__module__], time.sleep.__qualname__) is time.sleep
    ended = _thread.allocate_lock()
    ended.acquire()
    _thread.start_new_thread(time.sleep, (0.0,))
    _thread.start_new_thread(ended.release, ())
    assert ended.acquire(timeout=10.0)
    assert errors == []


def test_without_a_step_there_are_no_conditions(watch: ConditionWatch) -> None:
    assert watch.report(None, None, ahead=False) == {}

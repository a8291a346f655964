"""Traces: files that Perfetto loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hubring.ps.core import trace
from hubring.ps.core.timing import ClockOffset
from hubring.ps.core.trace import Trace
from hubring.ps.core.work import Work
from hubring.workers.runtime.training_record import FlightRecorder


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def test_a_clock_that_was_compared_is_noted_at_once(tmp_path: Path) -> None:
    left = Trace(tmp_path, "left", ClockOffset(ahead=-1500, round_trip=400))
    text = (tmp_path / "left.trace.json").read_text()
    [noted] = [event for event in json.loads(text + "]") if event["name"] == trace.CLOCK_OFFSET]
    assert (noted["ph"], noted["args"]["ahead_ns"], noted["args"]["round_trip_ns"]) == ("M", -1500, 400)
    assert noted["args"]["host"]
    left.close()


def test_the_trace_of_a_run_that_died_can_be_read(tmp_path: Path) -> None:
    left = Trace(tmp_path, "left")
    for number in range(trace.BUFFERED_SPANS):
        left.span("steps", f"step {number}", number, number + 1)
    left._file.flush()
    text = (tmp_path / "left.trace.json").read_text()
    assert len(json.loads(text + "]")) == trace.BUFFERED_SPANS + 3
    left.close()


def test_closing_twice_and_spans_after_it_change_nothing(tmp_path: Path) -> None:
    closed = Trace(tmp_path, "closed")
    closed.close()
    before = (tmp_path / "closed.trace.json").read_text()
    for number in range(trace.BUFFERED_SPANS):
        closed.span("steps", "late", number, number)
    closed.close()
    assert (tmp_path / "closed.trace.json").read_text() == before


def test_hidden_is_what_was_on_its_way_less_what_was_waited_for(tmp_path: Path) -> None:
    recorder = FlightRecorder(Trace(tmp_path, "worker 0"))
    first, second = Work("one"), Work("two")
    began = recorder._stepped
    recorder.sent(0, first, began)
    recorder.sent(1, second, began)
    first.complete_part()
    assert recorder.hidden_seconds == 0  # the second is still on its way
    second.complete_part()
    flown = recorder.hidden_seconds
    assert flown > 0
    recorder.waited(began, began + round(flown * 1e9), "send")
    assert recorder.hidden_seconds == 0
    recorder.stepped(1)
    recorder.close()
    names = [event["name"] for event in spans(tmp_path / "worker 0.trace.json")]
    assert names == ["exchange", "exchange", "send", "step 1"]

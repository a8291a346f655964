"""Traces: files that Perfetto loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hubring.ps.core import trace
from hubring.ps.core.clock_offset import Offset
from hubring.ps.core.trace import Trace
from hubring.ps.core.work import Work
from hubring.workers.runtime.in_flight import FlightRecorder


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def rows(path: Path) -> dict[int, str]:
    events = json.loads(path.read_text())
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


def test_a_span_is_an_event_in_its_row(tmp_path: Path) -> None:
    written = Trace(tmp_path / "made", "worker 3")
    written.span("steps", "step 1", 1_000_000, 3_500_000)
    written.span("waits", "wait", 2_000_000, 3_000_000)
    written.close()
    path = tmp_path / "made" / "worker 3.trace.json"
    step, wait = spans(path)
    assert [rows(path)[event["tid"]] for event in (step, wait)] == ["steps", "waits"]
    assert step["dur"] == 2500
    assert wait["ts"] - step["ts"] == 1000
    [process] = [event for event in json.loads(path.read_text()) if event["name"] == "process_name"]
    assert process["args"]["name"] == "worker 3"


def test_a_clock_that_was_compared_is_noted_at_once(tmp_path: Path) -> None:
    left = Trace(tmp_path, "left", Offset(ahead=-1500, round_trip=400))
    text = (tmp_path / "left.trace.json").read_text()
    [noted] = [event for event in json.loads(text + "]") if event["name"] == trace.CLOCK_OFFSET]
    assert (noted["ph"], noted["args"]["ahead_ns"], noted["args"]["round_trip_ns"]) == ("M", -1500, 400)
    assert noted["args"]["host"]
    left.close()


def test_what_was_written_of_a_run_that_died_can_be_read(tmp_path: Path) -> None:
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

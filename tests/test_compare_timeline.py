"""One timeline of all processes of a run."""

from __future__ import annotations

import json
from pathlib import Path

from ps.trace import Trace
from workers.compare.timeline import merge


def test_processes_lie_side_by_side_and_time_begins_with_the_first_span(tmp_path: Path) -> None:
    for name, began in (("worker 0", 5_000_000), ("worker 1", 9_000_000)):
        trace = Trace(tmp_path, name)
        trace._epoch = 7_000_000
        trace.span("steps", "step 1", began, began + 1_000_000)
        trace.close()
    assert merge(tmp_path, tmp_path / "trace.json") == 2
    merged = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    first, second = [event for event in merged if event["ph"] == "X"]
    assert (first["ts"], second["ts"]) == (0, 4000)
    assert {event["pid"] for event in merged} == {0, 1}


def test_a_process_that_was_killed_is_in_it_as_far_as_it_came(tmp_path: Path) -> None:
    trace = Trace(tmp_path, "worker 0")
    trace.span("steps", "step 1", 0, 10)
    trace.close()
    path = tmp_path / "worker 0.trace.json"
    whole = path.read_text()
    path.write_text(whole[: whole.rindex("{") + 1] + whole[whole.rindex("{") + 1 :][:20])
    (tmp_path / "worker 1.trace.json").write_text(whole[:-20])
    assert merge(tmp_path, tmp_path / "trace.json") == 0
    path.write_text(whole)
    assert merge(tmp_path, tmp_path / "trace.json") == 2


def test_without_spans_nothing_is_written(tmp_path: Path) -> None:
    assert merge(tmp_path, tmp_path / "trace.json") == 0
    assert not (tmp_path / "trace.json").exists()

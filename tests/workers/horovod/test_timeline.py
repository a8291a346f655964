"""The timeline: a file that Chrome's trace viewer and Perfetto load."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import hubring.horovod as hvd
from tests.workers.horovod.conftest import Everybody


def test_rank_0_writes_a_complete_event_for_every_operation(on_two: Everybody, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"

    def act() -> None:
        hvd.allreduce(torch.ones(2), name="before")
        hvd.start_timeline(str(file), mark_cycles=True)
        for _ in range(2):
            hvd.allreduce(torch.ones(2), name="loss")
        hvd.allgather(torch.ones(2), name="rows")
        hvd.stop_timeline()
        hvd.allreduce(torch.ones(2), name="after")

    on_two(act)
    events = json.loads(file.read_text())
    operations = [event for event in events if event["ph"] == "X"]
    assert [(one["name"], one["args"]["tensor"]) for one in operations] == [
        ("ALLREDUCE", "allreduce.loss"),
        ("ALLREDUCE", "allreduce.loss"),
        ("ALLGATHER", "allgather.rows"),
    ]
    for one in operations:
        assert one["ts"] >= 0
        assert one["dur"] >= 0
        assert {"pid", "tid", "cat"} <= one.keys()
    rows = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert rows == {"allreduce.loss": 1, "allgather.rows": 2}
    assert [one["tid"] for one in operations] == [1, 1, 2]


def test_a_run_that_dies_leaves_a_file_that_can_be_read(on_two: Everybody, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"

    def act() -> str:
        hvd.start_timeline(str(file))
        hvd.allreduce(torch.ones(2), name="loss")
        hvd.barrier()  # by then the line about the first is written
        so_far = file.read_text() if hvd.rank() == 0 else ""
        hvd.stop_timeline()
        return so_far

    # The viewers forgive a missing end of the array; json does not.
    events = json.loads(on_two(act)[0].rstrip().rstrip(",") + "]")
    assert "ALLREDUCE" in [event["name"] for event in events]

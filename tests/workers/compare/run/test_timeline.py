"""One timeline of all processes of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hubring.ps.core.timing import ClockOffset
from hubring.ps.core.trace import Trace
from hubring.workers.compare.cli import timeline
from hubring.workers.compare.run.timeline import HostClock, clock_sentence, merge, worst_clock


def traced(
    folder: Path, name: str, began: int, offset: ClockOffset | None, host: str, kernel: str = ""
) -> None:
    """A process that did one step of 1 ms, from `began` on its own clock, in nanoseconds since 1970."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hubring.ps.core.trace.name_kernel", lambda: kernel or f"kernel of {host}")
        patch.setattr("hubring.ps.core.trace.socket.gethostname", lambda: host)
        trace = Trace(folder, name, offset)
    trace._epoch = 0
    trace.span("steps", "step 1", began, began + 1_000_000)
    trace.close()


def steps(folder: Path) -> dict[int, float]:
    """By process: when its step began, in microseconds."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return {event["pid"]: event["ts"] for event in events if event["ph"] == "X"}


def test_hosts_whose_clocks_differ_are_put_on_the_coordinators(tmp_path: Path) -> None:
    late = 3_000_000_000
    traced(tmp_path, "shard 0", 5_000_000, ClockOffset(ahead=20_000, round_trip=100_000), "here")
    traced(tmp_path, "worker 0", 9_000_000 - late, ClockOffset(ahead=late, round_trip=400_000), "there")
    assert merge(tmp_path, tmp_path / "trace.json").processes == 2
    assert steps(tmp_path) == {0: 0, 1: 3980}
    assert names(tmp_path) == ["shard 0 on here", "worker 0 on there"]
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"] == {
        "kernel of here": {"name": "here", "moved_us": 20, "error_us": 50, "drift_us": None},
        "kernel of there": {"name": "there", "moved_us": 3e6, "error_us": 200, "drift_us": None},
    }


def test_the_error_includes_how_far_the_clocks_drifted_from_start_to_end(tmp_path: Path) -> None:
    traced(tmp_path, "worker 0", 0, ClockOffset(ahead=20_000, round_trip=100_000), "here")
    traced(tmp_path, "worker 1", 0, ClockOffset(ahead=1_000_000, round_trip=300_000), "there")
    traced(tmp_path, "worker 2", 0, ClockOffset(ahead=1_100_000, round_trip=900_000), "there")
    drifted = {"kernel of here": ClockOffset(0, 0), "kernel of there": ClockOffset(31_000_000, 400_000)}
    merged = merge(tmp_path, tmp_path / "trace.json", drifted)
    assert merged.clocks == [HostClock("here", 0, 0, 0), HostClock("there", 1_000, 150, 30_000)]
    assert str(merged.clocks[1]).endswith("with an error of at most 30.150 ms")
    assert str(HostClock("there", 1_000, 150)).endswith(
        "with an error of at most 0.150 ms when it was measured"
    )


def test_two_hosts_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for number, host in enumerate(("0a1b2c3d-4", "5e6f7a8b-9")):
        traced(tmp_path, f"worker {number}", 0, ClockOffset(number, 300_000 * (number + 1)), "node", host)
    merged = merge(tmp_path, tmp_path / "trace.json")
    assert [clock.name for clock in merged.clocks] == ["node (0a1b2c3d)", "node (5e6f7a8b)"]
    assert names(tmp_path) == ["worker 0 on node (0a1b2c3d)", "worker 1 on node (5e6f7a8b)"]
    assert [clock.error_us for clock in worst_clock([merged.clocks])] == [150, 300]


def names(folder: Path) -> list[str]:
    """Of the processes."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [event["args"]["name"] for event in events if event["name"] == "process_name"]


def test_hosts_that_did_not_compare_their_clocks_are_marked(tmp_path: Path) -> None:
    traced(tmp_path, "worker 0", 5_000_000, None, "here")
    traced(tmp_path, "worker 1", 9_000_000, None, "there")
    traced(tmp_path, "worker 2", 9_000_000, ClockOffset(ahead=0, round_trip=400_000), "known")
    assert merge(tmp_path, tmp_path / "trace.json").processes == 3
    assert steps(tmp_path) == {0: 0, 1: 4000, 2: 4000}
    assert names(tmp_path) == [
        "worker 0 on here (unaligned)",
        "worker 1 on there (unaligned)",
        "worker 2 on known",
    ]
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"] == {
        "kernel of here": {"name": "here", "moved_us": 0, "error_us": None, "drift_us": None},
        "kernel of there": {"name": "there", "moved_us": 0, "error_us": None, "drift_us": None},
        "kernel of known": {"name": "known", "moved_us": 0, "error_us": 200, "drift_us": None},
    }


def test_the_report_names_the_largest_error_of_each_host() -> None:
    runs = [
        [HostClock("here", 0, 0, 0), HostClock("there", -3e6, 150, 2)],
        [HostClock("here", 0, 0, 0), HostClock("there", -3.00002e6, 90, 50)],
        [HostClock("elsewhere", 5, 2)],
    ]
    assert worst_clock(runs) == [HostClock("here", 0, 0, 0), HostClock("there", -3.00002e6, 150, 50)]
    assert clock_sentence(worst_clock(runs)).endswith("there -3.000020 s, with an error of at most 0.200 ms.")
    assert worst_clock([*runs, [HostClock("here", 0, 0), HostClock("there")]])[1].error_us is None
    assert "there unknown" in clock_sentence([HostClock("here", 0, 0), HostClock("there")])
    assert clock_sentence(worst_clock(runs[2:])) == ""


def test_processes_of_one_host_stay_as_they_are_to_each_other(tmp_path: Path) -> None:
    traced(tmp_path, "worker 0", 1_000_000, ClockOffset(ahead=7_000_000, round_trip=900_000), "there")
    traced(tmp_path, "worker 1", 2_000_000, ClockOffset(ahead=6_800_000, round_trip=300_000), "there")
    traced(tmp_path, "worker 2", 8_800_000, ClockOffset(ahead=0, round_trip=300_000), "here")
    assert merge(tmp_path, tmp_path / "trace.json").processes == 3
    assert steps(tmp_path) == {0: 0, 1: 1000, 2: 1000}


def test_a_process_that_was_killed_is_in_it_as_far_as_it_came(tmp_path: Path) -> None:
    trace = Trace(tmp_path, "worker 0")
    trace.span("steps", "step 1", 0, 10)
    trace.close()
    path = tmp_path / "worker 0.trace.json"
    whole = path.read_text()
    path.write_text(whole[: whole.rindex("{") + 1] + whole[whole.rindex("{") + 1 :][:20])
    (tmp_path / "worker 1.trace.json").write_text(whole[:-20])
    assert merge(tmp_path, tmp_path / "trace.json").processes == 0
    path.write_text(whole)
    assert merge(tmp_path, tmp_path / "trace.json").processes == 2


def test_the_command_says_what_it_wrote_or_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as empty:
        timeline(tmp_path)
    assert empty.value.code == 2
    assert "use the folder given with --trace" in capsys.readouterr().err
    traced(tmp_path, "worker 0", 1_000_000, ClockOffset(0, 100), "here")
    with pytest.raises(SystemExit) as made:
        timeline(tmp_path)
    assert made.value.code == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["processes"] == 1
    assert last["clocks"] == [{"name": "here", "moved_us": 0, "error_us": 0, "drift_us": 0}]
    assert Path(last["timeline"]).exists()

"""One experiment file, and what its report and its timelines must hold wherever the experiment ran."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tests.support.processes.cluster import MEASURED

ROWS = ("ring", "hub-bsp", "ddp")
STEPS = 60
PATIENT = 400.0
"""Seconds for a comparison, whose dozen processes each import torch, also on a busy machine."""


def write_experiment(folder: Path) -> Path:
    """Writes the experiment file, and beside it its script."""
    lines = Path(MEASURED).read_text().splitlines(keepends=True)
    script = "".join(line for line in lines if "spare_compiler" not in line)  # DDP needs torch's compiler
    (folder / "train.py").write_text(script)
    experiment = folder / "mine.toml"
    experiment.write_text(
        f'script = "train.py"\narguments = ["{STEPS}", "{{seed}}"]\nmetric = "fit"\nrising = false\n'
        f"target = 0.5\nrows = {json.dumps(ROWS)}\nseeds = [1]\n"
    )
    return experiment


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def reported(out: Path) -> dict[str, Any]:
    """Returns the findings, after a look at what does not depend on where the experiment ran."""
    found = results(out)
    assert found["gate"]["passed"]
    assert found["job"]["title"] == "fit"
    assert all(row["numbers"]["samples_to_target"] is not None for row in found["rows"])
    assert [(row["row"], row["withheld"], row["failed"]) for row in found["rows"]] == [
        (row, None, None) for row in ROWS
    ]
    assert {pair["second"] for pair in found["gate"]["pairs"]} == {"hub-bsp", "ddp", "hub-bsp again"}
    assert all(each["judged"] > 0 and not each["fault"] for each in found["gate"]["steps"])
    assert {line["wrong"] for line in found["bandwidth"]} <= {0, None}
    page = (out / "report.html").read_text()
    assert all(row in page for row in ROWS)
    assert all(host in page for host in found["machine"].get("hosts", ()))
    return found


WARM_UP = 5
"""First steps that are left out: processes still load code in them."""
TOGETHER = 0.05
"""Seconds within which two workers end a step of a synchronous row, on a busy machine; no error of clocks."""


class Span(NamedTuple):
    """Of a step, in seconds since the first span."""

    began: float
    ended: float


class Timeline:
    """The timeline of a run with two workers.

    Attributes:
        clocks: The clock of each host, by name.
        names: Names of the two workers, with their hosts.
    """

    def __init__(self, run: Path) -> None:
        content = json.loads((run / "trace.json").read_text())
        events = content["traceEvents"]
        named = [event for event in events if event["name"] == "process_name"]
        processes = {event["args"]["name"]: event["pid"] for event in named}
        self.clocks: dict[str, Any] = {each["name"]: each for each in content["otherData"].values()}
        self.names = sorted(name for name in processes if name.startswith("worker"))
        self._steps = {
            name: [each for each in events if (each["pid"], each.get("cat")) == (processes[name], "steps")]
            for name in self.names
        }

    def error(self, host: str) -> float:
        """Returns the claimed error of a host's clock in seconds."""
        clock = self.clocks[host]
        return float(clock["error_us"] + (clock["drift_us"] or 0.0)) / 1e6

    def apart(self, *, moved: bool = True) -> float:
        """Returns how far the two workers' ends of a step are apart: the median, in seconds."""
        left, right = (self._spans(name, moved) for name in self.names)
        assert left.keys() == right.keys()
        return median([abs(left[step].ended - right[step].ended) for step in left][WARM_UP:])

    def causal(self, *, moved: bool = True) -> bool:
        """Returns whether no worker ends a step before the other begins it, as must be in lockstep."""
        left, right = (self._spans(name, moved) for name in self.names)
        error = sum(map(self.error, self.clocks))
        return all(
            left[step].ended > right[step].began - error and right[step].ended > left[step].began - error
            for step in left
        )

    def _spans(self, worker: str, moved: bool) -> Mapping[str, Span]:
        """Returns a worker's steps by name; without `moved`, by its own clock."""
        back = 0.0 if moved else self.clocks[worker.partition(" on ")[2]]["moved_us"]
        return {
            each["name"]: Span((each["ts"] - back) / 1e6, (each["ts"] + each["dur"] - back) / 1e6)
            for each in self._steps[worker]
        }


def aligned(out: Path, ahead: float, names: list[str]) -> None:
    """Checks all timelines of a comparison.

    Args:
        out: The comparison's folder.
        ahead: Seconds by which the clock of worker 1's host is ahead.
        names: Names of the workers in the timelines.
    """
    runs = sorted(file.parent for file in out.glob("runs/*/trace.json"))
    assert runs
    for run in runs:
        timeline = Timeline(run)
        print(f"{run.name}: ends of a step {1e3 * timeline.apart():.3f} ms apart; {timeline.clocks}")
        assert timeline.names == names
        there = names[1].partition(" on ")[2]
        # Emulated clocks do not drift, so what was added is known exactly.
        assert abs(timeline.clocks[there]["moved_us"] / 1e6 + ahead) <= timeline.error(there)
        assert timeline.causal()
        assert timeline.apart() < TOGETHER
        assert not timeline.causal(moved=False)
        assert timeline.apart(moved=False) > ahead - TOGETHER

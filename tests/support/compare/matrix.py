"""Predictions beside measurements in some forty emulated settings of which only a few were calibrated.

    python -m tests.support.compare.matrix --out /tmp/matrix

Needs root for network namespaces, and a machine on which nothing else runs. It takes about two hours on two
cores. The same command continues after an interruption. `--only GROUP` runs one group. The last lines have
the mean and the worst error; the exit code is 1 if they are above the targets, or in a full run if too few
settings count.

For each group and row the first setting without a straggler calibrates what the job takes besides its
exchange. It does not count; everything else is predicted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from msgspec.structs import replace

from hubring.workers.compare.findings import Findings, Prediction, RowResult, decode
from hubring.workers.compare.plan.setting import Setting
from hubring.workers.compare.predict.calibrations import read_constants
from hubring.workers.compare.predict.score import Score, model_bytes, trained

MEAN, WORST, COUNT = 0.07, 0.20, 35
"""Targets: mean and largest error, and the fewest settings that count."""


class Group(NamedTuple):
    """Experiments with one model.

    Attributes:
        name: Name of the group.
        hidden: Units of the hidden layer of the job digits, each 2,092 bytes.
        experiments: Keys of each experiment that differ from `COMMON`.
        limits: Targets: mean and largest error.
    """

    name: str
    hidden: int
    experiments: Sequence[Mapping[str, Any]]
    limits: tuple[float, float] = (MEAN, WORST)


COMMON = {"job": "digits", "rows": ["ring", "hub-bsp"], "epochs": 1, "target": 0.5, "tolerance": 0.001}


def settings(workers: int, servers: int | list[int], **link: Any) -> dict[str, Any]:
    """Returns the keys of an experiment with these links."""
    return {"workers": workers, "servers": servers, "link": link}


def slow(kind: str, *ranks: int, **more: Any) -> dict[str, Any]:
    """Returns the keys of an experiment with stragglers, for three rows."""
    straggler = {"kind": kind, "seconds": "20ms", "ranks": list(ranks), **more}
    rows = ["ring", "hub-bsp", "hub-asp"]
    return {**settings(4, 2, rate="1gbit"), "rows": rows, "straggler": straggler}


GROUPS = (
    # 0.5 MB: one slice, so that further servers are idle.
    Group(
        "small",
        250,
        [
            settings(2, 1, rate=["100mbit", "20mbit"], latency=["0ms", "5ms"]),
            settings(4, 2, rate=["100mbit", "20mbit"], latency=["0ms", "5ms"]),
            settings(8, 4, rate=["100mbit", "20mbit"], latency=["0ms", "5ms"]),
        ],
    ),
    # 4.2 MB: one bucket and one slice, although it is larger than a slice's default size.
    Group("one-slice", 2000, [settings(2, [1, 2], rate=["300mbit", "1gbit"], latency="0ms")]),
    # 6.3 MB: slices on all servers.
    Group(
        "large",
        3000,
        [
            settings(2, [1, 2, 4], rate=["1gbit", "300mbit"], latency=["0ms", "1ms"]),
            settings(4, [1, 2, 4], rate=["1gbit", "300mbit"], latency=["0ms", "1ms"]),
            settings(8, [1, 4], rate="1gbit", latency="0ms"),
            slow("constant", 1, baseline=True),  # so that hub-asp is calibrated
            slow("pareto", 0, 1, 2, 3, shape=2.5),
            slow("host", 0, 1),
        ],
    ),
)

_OUTSIDE = {"rows": ["ring", "hub-bsp", "hub-colocated"], "batch": 60}
"""A batch that 3 and 6 workers can share."""
OUTSIDE = Group(
    "outside",
    1000,
    [
        {**settings(3, 1, rate=["150mbit", "500mbit"], latency=["0ms", "2ms"]), **_OUTSIDE},
        {**settings(6, 3, rate="250mbit", latency="0ms"), **_OUTSIDE},
    ],
    limits=(0.10, 0.30),
)
"""Predictions in settings that no other group has, with a model of 2.1 MB; not part of a full run. Takes
about twenty minutes."""


def run(group: Group, out: Path, seeds: list[int]) -> Iterator[Path]:
    """Runs the experiments of a group; yields the folder of each."""
    for number, keys in enumerate(group.experiments):
        folder = out / f"{group.name}-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        toml = {**COMMON, "seeds": seeds, "arguments": ["--hidden", str(group.hidden)], **keys}
        file = folder / "matrix.toml"
        file.write_text(tomli_w.dumps(toml))
        compare = [sys.executable, "-m", "hubring.workers.compare.cli", "run", str(file)]
        done = subprocess.run([*compare, "--out", str(folder)], stdout=sys.stderr)
        # 1: a row differs from another by more than the tolerance, so the score leaves it out.
        if done.returncode not in (0, 1) or not (folder / "results.json").exists():
            raise SystemExit(f"{' '.join(compare)} ended with {done.returncode}")
        yield folder


def scored(found: Sequence[Findings], calibration: Path) -> list[Prediction]:
    """Returns the predictions of all experiments of a group, calibrated once for each row.

    Rows that something disturbed are neither calibrated nor predicted.
    """
    known: dict[str, Setting] = {each.key: each for findings in found for each in findings.settings}
    every: list[RowResult] = [row for findings in found for row in findings.rows]
    rows = [row for row in every if row.disturbed is None]
    for row in every:
        if row.disturbed is not None:
            print(f"left out: {row.setting} {row.row}, because {row.disturbed}", file=sys.stderr)
    nbytes = model_bytes(known.values(), rows)
    assert nbytes is not None, "no row that is shown has exchanged anything"
    asked = found[0].asked
    every_one = replace(found[0], settings=list(known.values()), rows=rows)
    return Score(every_one, read_constants(calibration), trained(asked, nbytes)).predictions()


def table(
    predictions: Iterable[tuple[str, Prediction]],
    fewest: int = COUNT,
    limits: tuple[float, float] = (MEAN, WORST),
) -> list[str]:
    """Returns a line for each prediction, and the mean and the largest error of those that count.

    Args:
        predictions: Behind the name of their group.
        fewest: How many must count.
        limits: Largest mean and largest error.
    """
    lines = ["group      row       measured ms predicted ms  error  setting"]
    errors = []
    for group, each in predictions:
        if each.error is None or each.measured_ms is None or each.predicted_ms is None:
            continue
        counts = "calibrated" if each.calibrated else f"{each.error:+.1%}"
        figures = f"{each.measured_ms:11.1f} {each.predicted_ms:12.1f} {counts:>10}"
        lines.append(f"{group:10} {each.row:9} {figures}  {each.setting}")
        errors += [] if each.calibrated else [abs(each.error)]
    if not errors:
        return [*lines, "no prediction counts"]
    mean, worst = sum(errors) / len(errors), max(errors)
    met = mean <= limits[0] and worst <= limits[1] and len(errors) >= fewest
    verdict = "within" if met else "not within"
    return [
        *lines,
        f"{len(errors)} predictions, mean error {mean:.1%}, worst {worst:.1%}: {verdict} the targets"
        f" ({fewest} or more, {limits[0]:.0%} and {limits[1]:.0%})",
    ]


def main() -> None:
    """Runs all groups and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    groups = {group.name: group for group in (*GROUPS, OUTSIDE)}
    parser.add_argument("--only", choices=list(groups))
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated [0,1,2]")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    predictions: list[tuple[str, Prediction]] = []
    chosen = [groups[options.only]] if options.only else GROUPS
    for group in chosen:
        folders = list(run(group, options.out, seeds))
        found = [decode((folder / "results.json").read_bytes()) for folder in folders]
        calibration = folders[0] / "calibration.json"
        predictions += [(group.name, each) for each in scored(found, calibration)]
    lines = table(predictions, 1 if options.only else COUNT, chosen[0].limits)
    print("\n".join(lines))
    raise SystemExit(0 if ": within" in lines[-1] else 1)


if __name__ == "__main__":
    main()

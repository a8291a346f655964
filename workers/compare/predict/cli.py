"""`ps-compare calibrate` and `ps-compare predict`.

No slow module is imported here, so that `--help` is fast.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hubring.ps.config import terminal
from hubring.ps.config.terminal import option

if TYPE_CHECKING:
    from hubring.workers.compare.predict.calibrations import Constants

CALIBRATION = Path("calibration.json")

SLOW = (
    option("straggler", str, "slow workers, KIND:SECONDS (constant, pareto or host): pareto:20ms"),
    option("straggler_ranks", str, "ranks of the slow workers, comma-separated [all]"),
)
"""Flags of `ps-compare run` too."""


@terminal.takes(
    (
        option("out", Path, "file to write", CALIBRATION),
        option("turns", int, "measurements of each figure", 7, min=2),
        option("job", str, "also measure this job's step: digits or char-lm"),
        option("serve", str, "measure nothing; serve as the other host on this address"),
        option("peer", str, "measure the link to the host at this address"),
        option("insecure", bool, "let --serve listen beyond loopback, without credentials", False),
    )
)
@terminal.concludes("ps-compare calibrate")
def calibrate(
    out: Path, turns: int, job: str | None, serve: str | None, peer: str | None, insecure: bool
) -> dict[str, Any]:
    """Measure the costs of wires and processors for `predict`. Each `run` does its own calibration.

    Takes about ten seconds and shows medians with their spread. Measure on an idle machine.
    """
    if serve is not None:
        from hubring.ps.core.errors import UsageError
        from hubring.workers.compare.predict import pair

        idle = [name for name, value in {"--peer": peer, "--job": job}.items() if value is not None]
        if idle:
            raise UsageError(
                f"--serve measures nothing, so it excludes {' and '.join(idle)}; remove one of them"
            )
        pair.serve_link(serve, insecure=insecure)
        return {"served": serve, "exit_code": 0}
    return _calibrate(out, turns, job, peer)


@terminal.takes(
    (
        option("workers", str, "numbers of workers, comma-separated", "2,4,8,16,64"),
        option("servers", str, "numbers of one-shard hosts, comma-separated", "1"),
        option(
            "rows",
            str,
            "ways to train, comma-separated, see ps-compare list; with GPUs also nccl, nccl-ring,"
            " nccl-tree and nccl-two-level [local,ring,hub-bsp,hub-ssp,hub-asp; with GPUs those of nccl]",
        ),
        option("model_bytes", int, "bytes of all parameters", min=1),
        option("job", str, "instead of --model-bytes: digits, mlp or resnet50 [digits]"),
        option("compute", str, "time of a worker's step, such as 50ms [the calibration's, or 0]"),
        option(
            "rate",
            str,
            "of each host's link, or of all links of a node, such as 25gbit [calibration's, or one machine]",
        ),
        option("latency", str, "between hosts, such as 20us [calibration's, or 0]"),
        option("gpus_per_node", int, "workers of a node, one on each GPU [calibration's, or 1]", min=1),
        option("intra", str, "links between GPUs of a node: nvlink, pcie, or a GPU's rate [calibration's]"),
        option("jitter", str, "of the latency, up and down [calibration's, or 0]"),
        option("workers_per_host", int, "workers that share a host and its link [1]", min=1),
        *SLOW,
        option("straggler_shape", float, "of a pareto delay; smaller: a heavier tail [2.5]", min=1.01),
        option("slice_bytes", int, "bytes of a slice [tuned]", min=4096),
        option("optimizer", str, "sgd, adam or adamw", "sgd"),
        option("transport", str, "of the hub: auto, shm, zmq or grpc", "auto"),
        option("overlap", float, "share of compute that the exchange can overlap with", 0.0, min=0, max=1),
        option("batch", float, "samples of one worker's step, to predict samples/s", min=1),
        option("buffer", int, "bytes of a switch's port [large enough]", min=1500),
        option("together", bool, "hosts are namespaces that share this machine's cores", False),
        option("steps", int, "steps to simulate where no formula applies", 100, min=10),
        option("seed", int, "first seed of the simulation", 0),
        option("seeds", int, "seeds to simulate where delays are random", 5, min=5),
        option(
            "calibration",
            str,
            "file from `calibrate`, output of nccl-tests, or bundled: host, h100, dgx-a100"
            " [calibration.json here, else host]",
        ),
        option("calibrate", bool, "measure this machine first, about ten seconds; saves no file", False),
    )
)
@terminal.concludes("ps-compare predict")
def predict(**options: Any) -> dict[str, Any]:
    """Predict step time and efficiency, and the number of servers with which the hub wins.

    Uses formulas where they apply, else a simulation; the table shows which. 10,000 workers take seconds.
    """
    from msgspec import to_builtins

    from hubring.workers.compare.predict.calibrations import BUNDLED, with_nodes
    from hubring.workers.compare.predict.question import answer_question, show_answer

    name, measured = _calibration(options.pop("calibration"), options.pop("calibrate"))
    nodes = options.pop("gpus_per_node"), options.pop("intra")
    constants = with_nodes(measured, *nodes, options["rate"], options["latency"])
    answer = answer_question(constants, options)
    show_answer(answer, constants, name)
    about = {"date": constants.date, "cores": constants.cores, "machine": dict(constants.machine)}
    calibration: dict[str, Any] = {"file": name or None, "bundled": name in BUNDLED}
    if (cluster := constants.cluster) is None:
        calibration |= about
    else:  # the host's constants are only those of rows that do not use NCCL
        calibration |= {"cluster": cluster.name, "gpus_per_node": cluster.gpus, "sources": cluster.sources}
        calibration |= {"host": about}
    return {"calibration": calibration, **to_builtins(answer), "exit_code": 0}


def _calibrate(out: Path, turns: int, job: str | None, peer: str | None) -> dict[str, Any]:
    from msgspec import to_builtins
    from msgspec.structs import replace

    from hubring.ps.core.packages import require_for_job
    from hubring.workers.compare.plan.experiment import find_job
    from hubring.workers.compare.predict.calibrate import calibrate as measure
    from hubring.workers.compare.predict.calibrate import own_step, show_constants

    if job is not None:  # before ten seconds of measurements
        require_for_job(find_job(job).name)
    constants = measure(turns, _log, peer)
    if job is not None:
        _log(f"the step of {job}")
        middle, least, most = own_step(job)
        spread = {**constants.spread, "compute": (least, most)}
        constants = replace(constants, compute=middle, spread=spread)
    constants.write(out)
    show_constants(constants)
    return {"calibration": str(out), **to_builtins(constants), "exit_code": 0}


def _calibration(given: str | None, measure: bool) -> tuple[str, Constants]:
    """Returns the calibration to predict with; `measure`: of this machine, without a file or a name."""
    from hubring.ps.core.errors import UsageError
    from hubring.workers.compare.predict.calibrations import find_calibration

    if not measure:
        return find_calibration(given)
    if given is not None:
        raise UsageError(f"--calibrate and --calibration {given} exclude each other; use one of them")
    from hubring.workers.compare.predict.calibrate import calibrate

    return "", calibrate(report=_log)


def _log(text: str) -> None:
    print(f"calibrate: {text}", file=sys.stderr)

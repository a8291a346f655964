"""`ps-compare calibrate` and `ps-compare predict`.

Only typer is imported here, so that `--help` is fast.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hubring.ps.config import terminal

if TYPE_CHECKING:
    from hubring.workers.compare.predict.calibrations import Constants

CALIBRATION = Path("calibration.json")

SlowWorkers = Annotated[
    str | None, typer.Option(help="slow workers, KIND:SECONDS (constant, pareto or host): pareto:20ms")
]
SlowRanks = Annotated[str | None, typer.Option(help="ranks of the slow workers, comma-separated [all]")]


def calibrate(
    out: Annotated[Path, typer.Option(help="file to write")] = CALIBRATION,
    turns: Annotated[int, typer.Option(min=2, help="measurements of each figure")] = 7,
    job: Annotated[str | None, typer.Option(help="also measure this job's step: digits or char-lm")] = None,
    serve: Annotated[
        str | None, typer.Option(help="measure nothing; serve as the other host on this address")
    ] = None,
    peer: Annotated[str | None, typer.Option(help="measure the link to the host at this address")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="let --serve listen beyond loopback, without credentials")
    ] = False,
) -> None:
    """Measure the costs of wires and processors for `predict`. Each `run` does its own calibration.

    Takes about ten seconds and shows medians with their spread. Measure on an idle machine.
    """
    if serve is not None:
        idle = [name for name, value in {"--peer": peer, "--job": job}.items() if value is not None]
        raise SystemExit(terminal.conclude("ps-compare calibrate", lambda: _serve(serve, insecure, idle)))
    raise SystemExit(terminal.conclude("ps-compare calibrate", lambda: _calibrate(out, turns, job, peer)))


def predict(
    workers: Annotated[str, typer.Option(help="numbers of workers, comma-separated")] = "2,4,8,16,64",
    servers: Annotated[str, typer.Option(help="numbers of one-shard hosts, comma-separated")] = "1",
    rows: Annotated[
        str | None,
        typer.Option(
            help="ways to train, comma-separated, see ps-compare list; with GPUs also nccl, nccl-ring,"
            " nccl-tree and nccl-two-level [local,ring,hub-bsp,hub-ssp,hub-asp; with GPUs those of nccl]"
        ),
    ] = None,
    model_bytes: Annotated[int | None, typer.Option(min=1, help="bytes of all parameters")] = None,
    job: Annotated[
        str | None, typer.Option(help="instead of --model-bytes: digits, mlp or resnet50 [digits]")
    ] = None,
    compute: Annotated[
        str | None, typer.Option(help="time of a worker's step, such as 50ms [the calibration's, or 0]")
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            help="of each host's link, or of all links of a node, such as 25gbit"
            " [calibration's, or one machine]"
        ),
    ] = None,
    latency: Annotated[
        str | None, typer.Option(help="between hosts, such as 20us [calibration's, or 0]")
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="workers of a node, one on each GPU [calibration's, or 1]")
    ] = None,
    intra: Annotated[
        str | None,
        typer.Option(help="links between GPUs of a node: nvlink, pcie, or a GPU's rate [calibration's]"),
    ] = None,
    jitter: Annotated[
        str | None, typer.Option(help="of the latency, up and down [calibration's, or 0]")
    ] = None,
    straggler: SlowWorkers = None,
    straggler_ranks: SlowRanks = None,
    straggler_shape: Annotated[
        float | None, typer.Option(min=1.01, help="of a pareto delay; smaller: a heavier tail [2.5]")
    ] = None,
    slice_bytes: Annotated[int | None, typer.Option(min=4096, help="bytes of a slice [tuned]")] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, adam or adamw")] = "sgd",
    transport: Annotated[str, typer.Option(help="of the hub: auto, shm, zmq or grpc")] = "auto",
    overlap: Annotated[
        float, typer.Option(min=0, max=1, help="share of compute that the exchange can overlap with")
    ] = 0.0,
    batch: Annotated[
        float | None, typer.Option(min=1, help="samples of one worker's step, to predict samples/s")
    ] = None,
    buffer: Annotated[
        int | None, typer.Option(min=1500, help="bytes of a switch's port [large enough]")
    ] = None,
    together: Annotated[
        bool, typer.Option("--together", help="hosts are namespaces that share this machine's cores")
    ] = False,
    steps: Annotated[int, typer.Option(min=10, help="steps to simulate where no formula applies")] = 100,
    seed: Annotated[int, typer.Option(help="first seed of the simulation")] = 0,
    seeds: Annotated[int, typer.Option(min=5, help="seeds to simulate where delays are random")] = 5,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="file from `calibrate`, output of nccl-tests, or bundled: host, h100, dgx-a100"
            " [calibration.json here, else host]"
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--calibrate", help="measure this machine first, about ten seconds; saves no file")
    ] = False,
) -> None:
    """Predict step time and efficiency, and the number of servers with which the hub wins.

    Uses formulas where they apply, else a simulation; the table shows which. 10,000 workers take seconds.
    """
    options = dict(locals())
    raise SystemExit(terminal.conclude("ps-compare predict", lambda: _predict(**options)))


def _serve(host: str, insecure: bool, idle: list[str]) -> dict[str, Any]:
    from hubring.ps.core.errors import UsageError
    from hubring.workers.compare.predict import pair

    if idle:
        raise UsageError(f"--serve measures nothing, so it excludes {' and '.join(idle)}; remove one of them")
    pair.serve_link(host, insecure=insecure)
    return {"served": host, "exit_code": 0}


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


def _predict(**options: Any) -> dict[str, Any]:
    from msgspec import to_builtins

    from hubring.workers.compare.predict.calibrations import BUNDLED, with_nodes
    from hubring.workers.compare.predict.question import answer_question, show_answer

    name, measured = _calibration(options.pop("calibration"), options.pop("measure"))
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

"""`ps-compare calibrate` and `ps-compare predict`.

Only typer is imported here, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hubring.ps.config import terminal

if TYPE_CHECKING:
    from hubring.workers.compare.cost.model.constants import Constants

CALIBRATION = Path("calibration.json")
ROWS = "local,ring,hub-bsp,hub-ssp,hub-asp"


def calibrate(
    out: Annotated[Path, typer.Option(help="file to write")] = CALIBRATION,
    turns: Annotated[int, typer.Option(min=2, help="measurements of each figure")] = 7,
    job: Annotated[str | None, typer.Option(help="measure this job's step too: digits or char-lm")] = None,
    serve: Annotated[
        str | None, typer.Option(help="measure nothing: be the other host, listening on this address")
    ] = None,
    peer: Annotated[str | None, typer.Option(help="measure the link to the host that serves there")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="with --serve: listen beyond loopback without credentials")
    ] = False,
) -> None:
    """Measure what wires and processors take here, for `predict`; each `run` measures anew for its report.

    Takes some ten seconds. Shown are medians and their spread; measure on an idle machine.
    """
    if serve is not None:
        idle = [name for name, value in {"--peer": peer, "--job": job}.items() if value is not None]
        raise SystemExit(terminal.conclude("ps-compare calibrate", lambda: _serve(serve, insecure, idle)))
    raise SystemExit(terminal.conclude("ps-compare calibrate", lambda: _calibrate(out, turns, job, peer)))


def predict(
    workers: Annotated[str, typer.Option(help="how many, by comma")] = "2,4,8,16,64",
    servers: Annotated[str, typer.Option(help="hosts with one shard each, by comma")] = "1",
    rows: Annotated[str, typer.Option(help="ways to train, by comma: see ps-compare list")] = ROWS,
    model_bytes: Annotated[int | None, typer.Option(min=1, help="of all parameters")] = None,
    job: Annotated[
        str | None, typer.Option(help="instead of --model-bytes: digits, mlp or resnet50 [digits]")
    ] = None,
    compute: Annotated[
        str | None, typer.Option(help="of a worker's step, as 50ms [what the calibration measured, or none]")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="of each host's link, as 25gbit [calibration's, or one machine]")
    ] = None,
    latency: Annotated[
        str | None, typer.Option(help="from host to host, as 20us [calibration's, or none]")
    ] = None,
    jitter: Annotated[
        str | None, typer.Option(help="of the latency, up and down [calibration's, or none]")
    ] = None,
    straggler: Annotated[
        str | None, typer.Option(help="slow workers: KIND:SECONDS, as pareto:20ms; constant, pareto or host")
    ] = None,
    straggler_ranks: Annotated[
        str | None, typer.Option(help="which of them are slow, by comma [all]")
    ] = None,
    slice_bytes: Annotated[int | None, typer.Option(min=4096, help="what travels at once [tuned]")] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, adam or adamw")] = "sgd",
    transport: Annotated[str, typer.Option(help="to the hub: auto, shm, zmq or grpc")] = "auto",
    overlap: Annotated[
        float, typer.Option(min=0, max=1, help="part of computing that the exchange hides behind")
    ] = 0.0,
    batch: Annotated[
        float | None, typer.Option(min=1, help="samples of one worker's step, to predict samples/s")
    ] = None,
    together: Annotated[
        bool, typer.Option("--together", help="hosts are namespaces that share this machine's cores")
    ] = False,
    steps: Annotated[int, typer.Option(min=10, help="simulated, where formulas do not hold")] = 100,
    seed: Annotated[int, typer.Option(help="of the simulation")] = 0,
    calibration: Annotated[
        Path | None,
        typer.Option(help="what `calibrate` wrote [calibration.json here, else measured now and not kept]"),
    ] = None,
) -> None:
    """Predict step time and efficiency, and from how many servers on the hub wins.

    Formulas where they hold, else a simulation; the table says which. Takes seconds for 10,000 workers.
    """
    options = dict(locals())
    raise SystemExit(terminal.conclude("ps-compare predict", lambda: _predict(**options)))


def _serve(host: str, insecure: bool, idle: list[str]) -> dict[str, Any]:
    from hubring.ps.core.errors import UsageError
    from hubring.workers.compare.cost.calibrate import peer

    if idle:
        raise UsageError(f"--serve measures nothing, so {' and '.join(idle)} cannot be met: leave one out")
    peer.serve(host, insecure=insecure)
    return {"served": host, "exit_code": 0}


def _calibrate(out: Path, turns: int, job: str | None, peer: str | None) -> dict[str, Any]:
    from msgspec import to_builtins
    from msgspec.structs import replace

    from hubring.workers.compare.cost import screen
    from hubring.workers.compare.cost.calibrate.calibration import calibrate as measure
    from hubring.workers.compare.cost.calibrate.own_step import own_step

    constants = measure(turns, _say, peer)
    if job is not None:
        _say(f"the step of {job}")
        middle, least, most = own_step(job)
        spread = {**constants.spread, "compute": (least, most)}
        constants = replace(constants, compute=middle, spread=spread)
    constants.write(out)
    screen.show_constants(constants)
    return {"calibration": str(out), **to_builtins(constants), "exit_code": 0}


def _predict(**options: Any) -> dict[str, Any]:
    from msgspec import to_builtins

    from hubring.workers.compare.cost import screen
    from hubring.workers.compare.cost.model.constants import read
    from hubring.workers.compare.cost.question import Question

    given: Path | None = options.pop("calibration")
    file = given or (CALIBRATION if CALIBRATION.exists() else None)
    constants = _measured() if file is None else read(file)
    answer = Question.ask(constants, **options).answer(constants)
    screen.show_answer(answer, constants, file)
    about = {"date": constants.date, "cores": constants.cores, "machine": dict(constants.machine)}
    calibration = {"file": None if file is None else str(file), **about}
    return {"calibration": calibration, **to_builtins(answer), "exit_code": 0}


def _measured() -> Constants:
    """What this machine can do, as it is now; a question leaves no file."""
    from hubring.workers.compare.cost.calibrate.calibration import calibrate as measure

    _say(f"there is no {CALIBRATION} here; measuring this machine, some ten seconds")
    return measure(tell=_say)


def _say(text: str) -> None:
    print(f"calibrate: {text}", file=sys.stderr)

"""`ps-compare`: trains one job on several topologies and tells which is fastest, once they agree.

Only typer is imported here, so that `--help` answers at once.
"""

from __future__ import annotations

import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ps import terminal
from workers.compare.cost import cli as cost

if TYPE_CHECKING:
    from workers.compare.comparison import Comparison

app = typer.Typer(
    help="One job on several topologies: do they agree, and which is fastest?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ALL_ROWS = "local,ring,hub-bsp,hub-ssp,hub-asp,hub-aggregate"


@app.command()
def run(
    job: Annotated[str, typer.Option(help="digits or char-lm")] = "digits",
    workers: Annotated[int, typer.Option(min=1, help="processes that share the batch")] = 2,
    shards: Annotated[int, typer.Option(min=1, help="shard processes of the hub")] = 1,
    epochs: Annotated[int | None, typer.Option(min=1, help="of the job [as many as it likes]")] = None,
    seed: Annotated[int, typer.Option(help="of the job")] = 0,
    rows: Annotated[str, typer.Option(help="which ways to train, by comma")] = ALL_ROWS,
    target: Annotated[
        float | None, typer.Option(help="value to reach [digits: 0.93 accuracy; char-lm: 2.5 bits]")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="how far synchronous rows may be apart [0.0001]")
    ] = None,
    transport: Annotated[str, typer.Option(help="to the hub: auto, shm, zmq or grpc")] = "auto",
    timeout: Annotated[float, typer.Option(help="seconds that one row may take")] = 600.0,
    out: Annotated[Path | None, typer.Option(help="directory to write to [results/DATE]")] = None,
) -> None:
    """Train, judge, measure; the report's path is in the last line.

    Ends with 1 where synchronous rows disagree.
    """
    raise SystemExit(_run(dict(locals())))


app.command()(cost.calibrate)
app.command()(cost.predict)


def main() -> None:
    """Console entry of `ps-compare`."""
    terminal.unwind_on_sigterm()
    terminal.run(app, "ps-compare")


def _run(options: dict[str, Any]) -> int:
    """Compares; the last line is the result, or the error."""
    return terminal.conclude("ps-compare", lambda: _compare(_comparison(**options)))


def _comparison(
    job: str, rows: str, workers: int, seed: int, epochs: int | None, out: Path | None, **more: Any
) -> Comparison:
    from workers.compare import gate, machine
    from workers.compare.comparison import Comparison
    from workers.compare.job import find
    from workers.compare.row import select
    from workers.compare.runner import Runner

    chosen = find(job)
    runner = Runner(
        job=job,
        job_arguments=("--seed", str(seed), *(() if epochs is None else ("--epochs", str(epochs)))),
        workers=workers,
        shards=more["shards"],
        transport=more["transport"],
        threads=max(1, machine.cores() // workers),
        timeout=more["timeout"],
        directory=out or Path("results") / f"{datetime.now():%Y-%m-%d-%H%M%S}",
    )
    return Comparison(
        job=chosen,
        rows=select(name.strip() for name in rows.split(",")),
        runner=runner,
        seed=seed,
        epochs=epochs,
        target=chosen.target if more["target"] is None else more["target"],
        tolerance=gate.TOLERANCE if more["tolerance"] is None else more["tolerance"],
        command=shlex.join(["ps-compare", *sys.argv[1:]]),
    )


def _compare(comparison: Comparison) -> dict[str, Any]:
    from workers.compare.screen import Screen

    with Screen(list(comparison.runs)) as screen:
        measures, results = comparison.run(screen.progress, screen.finished)
    screen.show(measures, results, comparison.job)
    directory = comparison.runner.directory
    return {
        "report": str(directory / "report.html"),
        "results": str(directory / "results.json"),
        "rows": results["rows"],
        "gate": results["gate"],
        "verdict": results["verdict"],
        "exit_code": 0 if results["gate"]["passed"] else 1,
    }


if __name__ == "__main__":
    main()

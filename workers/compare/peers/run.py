"""A worker of a peer's row: `python -m hubring.workers.compare.peers.run`, as `ps-worker` is of ours.

Only typer is imported here, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hubring.ps.config import terminal

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

PROGRAM = "peer"

_SEAT = ("rank", "meet", "servers", "host", "backend")
_OWN = (*_SEAT, "command", "peer", "world_size", "result")
"""What is told to the peer; the rest are a worker's settings."""


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    peer: Annotated[str, typer.Option(help="ddp, mpi, rpc or ray")],
    rank: Annotated[int, typer.Option(help="this worker's")],
    world_size: Annotated[int, typer.Option(help="how many workers there are")],
    meet: Annotated[str, typer.Option(help="HOST:PORT, or a file that all see, where they find each other")],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SCRIPT] [ARGS]...", help="your script and its arguments; none: --job"),
    ] = None,
    local_rank: Annotated[int | None, typer.Option(help="among the workers of this host [0]")] = None,
    servers: Annotated[int, typer.Option(help="server processes of rpc")] = 0,
    host: Annotated[str | None, typer.Option(help="own address: talk through its interface alone")] = None,
    backend: Annotated[str, typer.Option(help="of ddp: gloo or nccl")] = "gloo",
    result: Annotated[Path | None, typer.Option(help="write the last line here, too")] = None,
    job: Annotated[str | None, typer.Option(help="without a script: digits or char-lm [digits]")] = None,
    record: Annotated[Path | None, typer.Option(help="write every report here, JSON lines")] = None,
    trace: Annotated[Path | None, typer.Option(help="folder: what happens when, for Perfetto")] = None,
    save_parameters: Annotated[
        Path | None, typer.Option(help="rank 0 writes the last parameters here")
    ] = None,
    save_parameters_at: Annotated[
        int | None, typer.Option(help="and those after so many steps, into a file beside it")
    ] = None,
    hardship: Annotated[Path | None, typer.Option(help="JSON: how long to sleep in every step")] = None,
    timeout: Annotated[float | None, typer.Option(help="seconds an exchange may take [300]")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json [text]")] = None,
) -> None:
    """Train a script as one worker of somebody else's way to train."""
    told = {name: value for name, value in locals().items() if value is not None}
    settings = {name: value for name, value in told.items() if name not in _OWN}
    code, line = _train(told, settings)
    if result is not None:
        result.write_text(json.dumps(line))
    terminal.last_line(line)
    if code:
        # What waits for the others, in torch's threads or MPI's end, would wait for ever.
        sys.stderr.flush()
        os._exit(code)


def _train(told: dict[str, Any], settings: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Trains, and returns the exit code and the last line."""
    from hubring.ps.config.sources import load_worker
    from hubring.ps.core.errors import HubringError
    from hubring.ps.observe import logs
    from hubring.workers.compare.peers.stand_in import StandIn
    from hubring.workers.peers.seat import Seat
    from hubring.workers.run_script import Outcome, train

    stand_in = None
    try:
        config = load_worker(settings)
        place = logs.configure(config.log_format)
        seat = {name: told[name] for name in _SEAT if name in told}
        stand_in = StandIn(told["peer"], Seat(size=told["world_size"], **seat))
        stand_in.install()
        module = f"hubring.workers.examples.{config.job.replace('-', '_')}"
        outcome = train(config, place, module, config.job, told.get("command", []))
    except HubringError as error:
        outcome = Outcome(error.exit_code, {}, error=str(error))
    if outcome.error:
        print(f"{PROGRAM}: {outcome.error}", file=sys.stderr)
    print(outcome.traceback, file=sys.stderr, end="")
    result = outcome.result if stand_in is None else stand_in.honest(outcome.result)
    failed = {"error": outcome.error} if outcome.error else {}
    return outcome.code, {**result, "exit_code": outcome.code, **failed}


def main() -> None:
    """Entry of the program."""
    terminal.run(app, PROGRAM)


if __name__ == "__main__":
    main()

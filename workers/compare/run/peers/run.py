"""A worker of a peer's row, like `ps-worker`: `python -m hubring.workers.compare.run.peers.run`.

Only typer is imported here, so that `--help` is fast.
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
"""Options of the peer; the others are a worker's settings."""


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    peer: Annotated[str, typer.Option(help="ddp, fsdp2, zero1, mpi, rpc or ray")],
    rank: Annotated[int, typer.Option(help="rank of this worker")],
    world_size: Annotated[int, typer.Option(help="number of workers")],
    meet: Annotated[str, typer.Option(help="HOST:PORT or a shared file, where workers find each other")],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SCRIPT] [ARGS]...", help="your script and its arguments; default: --job"),
    ] = None,
    local_rank: Annotated[int | None, typer.Option(help="rank among this host's workers [0]")] = None,
    servers: Annotated[int, typer.Option(help="number of rpc servers")] = 0,
    host: Annotated[
        str | None, typer.Option(help="own address; use only its interface, but for NCCL")
    ] = None,
    backend: Annotated[str, typer.Option(help="of ddp, fsdp2 and zero1: gloo or nccl")] = "gloo",
    result: Annotated[Path | None, typer.Option(help="also write the last line to this file")] = None,
    job: Annotated[str | None, typer.Option(help="without a script: digits or char-lm [digits]")] = None,
    record: Annotated[Path | None, typer.Option(help="write every report to this file, JSON lines")] = None,
    audit: Annotated[Path | None, typer.Option(help="write sampled elements of every step here")] = None,
    trace: Annotated[Path | None, typer.Option(help="write a trace for Perfetto to this folder")] = None,
    save_parameters: Annotated[
        Path | None, typer.Option(help="rank 0 writes the final parameters to this file")
    ] = None,
    save_parameters_at: Annotated[
        int | None, typer.Option(help="also write those after this many steps, next to that file")
    ] = None,
    hardship: Annotated[Path | None, typer.Option(help="JSON file: time to sleep in every step")] = None,
    timeout: Annotated[float | None, typer.Option(help="limit of an exchange in seconds [300]")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json [text]")] = None,
) -> None:
    """Train a script as one worker of a peer."""
    given = {name: value for name, value in locals().items() if value is not None}
    settings = {name: value for name, value in given.items() if name not in _OWN}
    code, line = _train(given, settings)
    if result is not None:
        result.write_text(json.dumps(line))
    terminal.last_line(line)
    if code:
        # A normal exit would wait for the other ranks, in torch's threads or MPI's finalizer, forever.
        sys.stderr.flush()
        os._exit(code)


def _train(given: dict[str, Any], settings: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Trains; returns the exit code and the last line."""
    from hubring.ps.config.sources import load_worker
    from hubring.ps.core.errors import HubringError
    from hubring.ps.observe import logs
    from hubring.workers.compare.run.peers.peer import StandIn
    from hubring.workers.peers.rendezvous import PeerRendezvous
    from hubring.workers.run_script import ScriptOutcome, train

    stand_in = None
    try:
        config = load_worker(settings)
        place = logs.configure(config.log_format, logger=logs.OURS)
        seat = {name: given[name] for name in _SEAT if name in given}
        stand_in = StandIn(given["peer"], PeerRendezvous(size=given["world_size"], **seat))
        stand_in.install()
        module = f"hubring.workers.examples.{config.job.replace('-', '_')}"
        outcome = train(config, place, module, config.job, given.get("command", []))
    except HubringError as error:
        outcome = ScriptOutcome(error.exit_code, {}, error=str(error))
    print(outcome.text(PROGRAM), file=sys.stderr, end="")
    result = outcome.result if stand_in is None else stand_in.honest(outcome.result)
    failed = {"error": outcome.error} if outcome.error else {}
    return outcome.code, {**result, "exit_code": outcome.code, **failed}


def main() -> None:
    """Run this program."""
    terminal.run(app, PROGRAM)


if __name__ == "__main__":
    main()

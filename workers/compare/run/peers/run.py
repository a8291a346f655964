"""A worker of a peer's row, like `ps-worker`: `python -m hubring.workers.compare.run.peers.run`.

Only typer and the settings are imported here, so that `--help` is fast.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hubring.ps.config import terminal
from hubring.ps.config.worker import WorkerConfig

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

PROGRAM = "peer"

_SETTINGS = (
    *("local_rank", "job", "record", "audit", "trace", "save_parameters", "save_parameters_at"),
    *("hardship", "timeout", "log_format"),
    *("server", "transport", "aggregate", "accelerator", "insecure", "as_gloo"),
)
"""Settings of a worker that a peer's worker has too; the last line is for `ddp-hub`."""


@app.command(context_settings={"allow_interspersed_args": False})
@terminal.takes(terminal.options(WorkerConfig, _SETTINGS))
def run(
    peer: Annotated[str, typer.Option(help="ddp, ddp-hub, fsdp2, zero1, mpi, rpc or ray")],
    rank: Annotated[int, typer.Option(help="rank of this worker")],
    world_size: Annotated[int, typer.Option(help="number of workers")],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SCRIPT] [ARGS]...", help="your script and its arguments; default: --job"),
    ] = None,
    meet: Annotated[str, typer.Option(help="HOST:PORT or a shared file, where workers find each other")] = "",
    servers: Annotated[int, typer.Option(help="number of rpc servers")] = 0,
    host: Annotated[
        str | None, typer.Option(help="own address; use only its interface, but for NCCL")
    ] = None,
    backend: Annotated[str, typer.Option(help="of ddp, fsdp2 and zero1: gloo or nccl")] = "gloo",
    result: Annotated[Path | None, typer.Option(help="also write the last line to this file")] = None,
    master: Annotated[str, typer.Option(help="HOST:PORT for a group of the script's own")] = "",
    metric: Annotated[str, typer.Option(help="key of the metric that the script prints")] = "",
    metric_regex: Annotated[str | None, typer.Option(help="finds it in the script's output")] = None,
    samples_per_step: Annotated[int | None, typer.Option(help="samples of a step of all workers")] = None,
    **settings: object,
) -> None:
    """Train a script as one worker of a peer."""
    seat = {"rank": rank, "meet": meet, "servers": servers, "host": host, "backend": backend}
    watched = (samples_per_step, metric, metric_regex) if master else None
    if master:
        _export_place(master, rank, world_size, settings["local_rank"], on_cpu=backend == "gloo")
    code, line = _train(peer, {**seat, "size": world_size}, settings, command or [], watched)
    if result is not None:
        result.write_text(json.dumps(line))
    terminal.last_line(line)
    if code:
        # A normal exit would wait for the other ranks, in torch's threads or MPI's finalizer, forever.
        sys.stderr.flush()
        os._exit(code)


def _export_place(master: str, rank: int, size: int, local_rank: Any, *, on_cpu: bool) -> None:
    """Sets what a script reads that makes a group of its own."""
    from hubring.ps.config.environment import export
    from hubring.ps.config.values import is_loopback
    from hubring.workers.launchers.known_launchers import place_variables

    host, _, port = master.rpartition(":")
    place = place_variables(rank, size, local_rank, size, 0)
    if not is_loopback(host):  # the workers may be on several hosts
        del place["LOCAL_WORLD_SIZE"], place["GROUP_RANK"]
    export({"MASTER_ADDR": host, "MASTER_PORT": port, **place})
    if on_cpu:
        export({"ACCELERATE_USE_CPU": "true"})  # else its ranks train alone, each for itself


def _train(
    peer: str,
    seat: dict[str, Any],
    settings: dict[str, object],
    words: list[str],
    watched: tuple[int | None, str, str | None] | None,
) -> tuple[int, dict[str, Any]]:
    """Trains; returns the exit code and the last line."""
    from hubring.ps.config.sources import load_worker
    from hubring.ps.core.errors import HubringError
    from hubring.ps.observe import logs
    from hubring.workers.compare.run.peers.peer import StandIn
    from hubring.workers.compare.run.peers.unedited import ON_HUB, ScriptWatch
    from hubring.workers.peers.rendezvous import PeerRendezvous, talk_through
    from hubring.workers.run_script import ScriptOutcome, train

    stand_in = watch = None
    try:
        config = load_worker(settings)
        place = logs.configure(config.log_format, logger=logs.OURS)
        if watched is not None:
            watch = ScriptWatch(peer, seat["size"], *watched)
            talk_through(seat["host"])
        if peer != ON_HUB:
            stand_in = StandIn(peer, PeerRendezvous(**seat), watch.close if watch else lambda: None)
            stand_in.install()
        module = f"hubring.workers.examples.{config.job.replace('-', '_')}"
        outcome = train(config, place, module, config.job, words)
    except HubringError as error:
        outcome = ScriptOutcome(error.exit_code, error=str(error))
    print(outcome.text(PROGRAM), file=sys.stderr, end="")
    line = outcome.last_line
    line = line if stand_in is None else stand_in.honest(line)
    return outcome.code, line if watch is None else watch.honest(line)


def main() -> None:
    """Run this program."""
    terminal.run(app, PROGRAM)


if __name__ == "__main__":
    main()

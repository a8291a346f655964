"""`ps-worker`: runs a training script, or a job that ships, as one worker.

Only typer is imported here, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hubring.ps.config import terminal

if TYPE_CHECKING:
    from hubring.ps.config.worker import WorkerConfig
    from hubring.ps.observe.logs import Place

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

JOBS = {"digits": "hubring.workers.examples.digits", "char-lm": "hubring.workers.examples.char_lm"}


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SCRIPT] [ARGS]...", help="your script and its arguments; none: --job"),
    ] = None,
    server: Annotated[str | None, typer.Option(help="HOST:PORT of the hub; none: train alone")] = None,
    topology: Annotated[str | None, typer.Option(help="hub or ring [hub]")] = None,
    backend: Annotated[str | None, typer.Option(help="of the ring: gloo or nccl [gloo]")] = None,
    aggregate: Annotated[
        bool | None, typer.Option("--aggregate", help="the hub averages, this worker's optimizer steps")
    ] = None,
    compress: Annotated[
        str | None,
        typer.Option(help="gradients: bf16, fp16, int8, sign, topk:0.01 or powersgd:4 [not at all]"),
    ] = None,
    transport: Annotated[str | None, typer.Option(help="to the hub: auto, shm, zmq or grpc [auto]")] = None,
    rank: Annotated[int | None, typer.Option(help="[as the launcher says, else as the hub assigns]")] = None,
    world_size: Annotated[
        int | None, typer.Option(help="[as the launcher says, else as the hub says]")
    ] = None,
    local_rank: Annotated[int | None, typer.Option(help="[as the launcher says, else 0]")] = None,
    as_horovod: Annotated[
        bool | None, typer.Option("--as-horovod", help="the script's horovod.torch is this project's")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="with --gpus: hosts [as the launcher, else 1]")] = None,
    gpus: Annotated[
        int | None, typer.Option(help="start so many workers here: one a GPU, or processes on the CPU")
    ] = None,
    nr: Annotated[
        int | None, typer.Option(help="with --gpus: which host this is [as the launcher says, else 0]")
    ] = None,
    job: Annotated[str | None, typer.Option(help="without a script: digits or char-lm [digits]")] = None,
    record: Annotated[Path | None, typer.Option(help="write every report here, JSON lines")] = None,
    trace: Annotated[Path | None, typer.Option(help="folder: what happens when, for Perfetto")] = None,
    save_parameters: Annotated[
        Path | None, typer.Option(help="rank 0 writes the last parameters here")
    ] = None,
    save_parameters_at: Annotated[
        int | None, typer.Option(help="and beside it those after so many steps")
    ] = None,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="ring, --aggregate or alone: rank 0 saves here and resumes from here")
    ] = None,
    checkpoint_every: Annotated[
        float | None, typer.Option(help="seconds between such checkpoints [60]")
    ] = None,
    on_preempt: Annotated[
        str | None,
        typer.Option(help="SIGTERM: all stop, this one may leave, or auto: as the launcher [auto]"),
    ] = None,
    bucket_bytes: Annotated[int | None, typer.Option(help="gradient exchanged together [tuned]")] = None,
    timeout: Annotated[
        float | None, typer.Option(help="seconds an exchange or the start may take [300]")
    ] = None,
    hardship: Annotated[
        Path | None, typer.Option(help="JSON: how long to sleep in every step", hidden=True)
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json [text]")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with a [worker] table")] = None,
) -> None:
    """Train as one worker: through a hub, around a ring, or alone.

    Arguments for a job that ships stand behind --, as in: ps-worker --job digits -- --epochs 3

    ps-worker bench times the exchange alone: see ps-worker bench --help

    ps-worker env --explain says which rank this would be, and why
    """
    flags = dict(locals())
    config_file, words = flags.pop("config"), flags.pop("command") or []
    raise SystemExit(_run(flags, config_file, words))


def main() -> None:
    """Console entry of `ps-worker`."""
    if sys.argv[1:2] == ["bench"]:  # a word of its own, where any other would name a script
        from hubring.workers.bench import cli

        cli.main(sys.argv[2:])
    if sys.argv[1:2] == ["env"]:
        from hubring.workers.programs import explain

        explain.main(sys.argv[2:])
    elsewhere = "a job's own arguments stand behind --, as in ps-worker --job digits -- --epochs 3"
    terminal.run(app, "ps-worker", elsewhere=elsewhere)


def _run(flags: dict[str, object], config_file: Path | None, words: list[str]) -> int:
    from hubring.ps.config.sources import load_worker
    from hubring.ps.core.errors import HubringError
    from hubring.ps.observe import logs
    from hubring.workers.programs import node_launcher

    try:
        config = load_worker(flags, config_file)
        place = logs.configure(config.log_format)
        if node_launcher.wanted(config):  # which trains nothing itself, and does without torch
            return node_launcher.run(config, flags, config_file, words)
    except HubringError as error:
        return _end(error.exit_code, {}, str(error))
    node_launcher.follow()
    return _train(config, place, words)


def _train(config: WorkerConfig, place: Place, words: list[str]) -> int:
    from hubring.ps.core.errors import HubringError
    from hubring.workers.run import Outcome, train

    try:
        outcome = train(config, place, JOBS[config.job], config.job, words)
    except HubringError as error:
        outcome = Outcome(error.exit_code, {}, error=str(error))
    code = _end(outcome.code, outcome.result, outcome.error, outcome.traceback)
    if outcome.stuck:
        # A broken ring leaves threads inside torch that no call can free.
        sys.stderr.flush()
        os._exit(code)
    return code


def _end(code: int, result: dict[str, Any], error: str, traceback: str = "") -> int:
    """Tells people and programs how it ended; returns the code."""
    if error:
        print(f"ps-worker: {error}", file=sys.stderr)
    if traceback:
        print(traceback, file=sys.stderr, end="")
    terminal.last_line({**result, "exit_code": code, **({"error": error} if error else {})})
    return code


if __name__ == "__main__":
    main()

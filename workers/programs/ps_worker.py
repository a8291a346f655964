"""`ps-worker`: runs a training script, or a built-in job, as one worker; and `ps-worker env`.

`env` starts nothing and contacts no server. Values that only the server knows stay empty.

This module imports only typer and the settings, so that `--help` is fast.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hubring.ps.config import terminal
from hubring.ps.config.terminal import CommandWithGroups, ConfigFile, options, takes
from hubring.ps.config.worker import WorkerConfig

if TYPE_CHECKING:
    from hubring.ps.observe.logs import LogOrigin

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)

JOBS = {"digits": "hubring.workers.examples.digits", "char-lm": "hubring.workers.examples.char_lm"}

WORKER_PAUSE_SECONDS = 5.0
"""Before the first restart of a lost worker: the hub frees its rank 4 s after its connection closed."""


@app.command(cls=CommandWithGroups, context_settings={"allow_interspersed_args": False})
@takes(options(WorkerConfig))
def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCRIPT] [ARGS]...", help="your script and its arguments [default: a built-in --job]"
        ),
    ] = None,
    module: terminal.IsModule = False,
    version: Annotated[bool, terminal.version_option()] = False,
    config: ConfigFile = None,
    **flags: object,
) -> None:
    """Train as one worker: through a hub, around a ring, or alone.

    Pass arguments to a built-in job after --, as in: ps-worker --job digits -- --epochs 3

    ps-worker bench measures the exchange; see ps-worker bench --help

    ps-worker env --explain prints this worker's rank and settings, and the source of each
    """
    raise SystemExit(_run(flags, config, command or [], is_module=module))


def main() -> None:
    """Console entry of `ps-worker`."""
    if sys.argv[1:2] == ["bench"]:  # a subcommand; any other first argument names a script
        from hubring.workers.bench import cli

        cli.main(sys.argv[2:])
    if sys.argv[1:2] == ["env"]:
        terminal.run(env_app, "ps-worker env", sys.argv[2:])
    elsewhere = "pass arguments to a built-in job after --: ps-worker --job digits -- --epochs 3"
    terminal.run(app, "ps-worker", elsewhere=elsewhere)


def _run(flags: dict[str, object], config_file: Path | None, words: list[str], *, is_module: bool) -> int:
    from hubring.ps.config.environment import environment
    from hubring.ps.config.sources import load_worker
    from hubring.ps.core.errors import HubringError
    from hubring.ps.observe import logs
    from hubring.ps.process.launch import PARENT_VARIABLE, end_with_parent
    from hubring.ps.process.restarts import Restarts, as_child, is_supervised, supervise
    from hubring.ps.security.access import check_token_file
    from hubring.ps.security.certificate import load_certificate
    from hubring.ps.security.guard import Role
    from hubring.workers.programs import node_launcher

    try:
        config = load_worker(flags, config_file)
        if config.server is not None:  # before the import of torch, which takes seconds
            check_token_file(config.token_file, Role.WORKER)
            load_certificate(config.tls, serves=False)
        if config.restarts and not is_supervised(environment()):
            restarts = Restarts(config.restarts, WORKER_PAUSE_SECONDS)
            begin = as_child("ps-worker", "hubring.workers.programs.ps_worker", environment())
            return supervise("ps-worker", begin, restarts)
        origin = logs.configure(config.log_format, logger=logs.OURS)
        if node_launcher.wanted(config):  # the launcher does not train, and does not import torch
            again = ["--module"] if is_module else []
            return node_launcher.run(config, flags, config_file, [*again, "--", *words])
        # Ends with the command that started it, if any. A process of the script inherits the variable.
        end_with_parent(int(environment().get(PARENT_VARIABLE, 0)))
        return _train(config, origin, words, is_module=is_module)
    except HubringError as error:
        return _end({"error": str(error), "exit_code": error.exit_code}, f"ps-worker: {error}\n")


def _train(config: WorkerConfig, origin: LogOrigin, words: list[str], *, is_module: bool) -> int:
    gc.disable()  # it would look through torch's objects for 0.3 s
    from hubring.workers.run_script import train

    gc.enable()
    outcome = train(config, origin, JOBS[config.job], config.job, words, is_module=is_module)
    code = _end(outcome.last_line, outcome.text("ps-worker"))
    if outcome.stuck:
        # A broken ring leaves threads blocked inside torch. No call can end them.
        sys.stderr.flush()
        os._exit(code)
    return code


def _end(result: dict[str, Any], text: str) -> int:
    """Prints the text of the error and the result line, and returns the exit code."""
    print(text, file=sys.stderr, end="", flush=True)
    terminal.last_line(result)
    code: int = result["exit_code"]
    return code


env_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@env_app.command(cls=CommandWithGroups)
@takes(
    options(
        WorkerConfig, ["server", "topology", "backend", "accelerator", "rank", "world_size", "local_rank"]
    )
)
def env(
    explain: Annotated[bool, typer.Option("--explain", help="print where each value comes from")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of lines")] = False,
    config: ConfigFile = None,
    **flags: object,
) -> None:
    """Print this worker's rank, world size, launcher, server, device and threads."""

    def act() -> int:
        report = gather(flags, config)
        print(json.dumps(report) if as_json else "\n".join(lines(report, explain)))
        return 0

    raise SystemExit(terminal.conclude("ps-worker", act))


def gather(flags: Mapping[str, object], config_file: Path | None = None) -> dict[str, Any]:
    """Returns all values with their sources, the ignored values, and the variables that are not set.

    Args:
        flags: Field name to the value on the command line; None if the flag is absent.
        config_file: TOML file; None: the file that PS_CONFIG names, if any.

    Raises:
        ConfigError: Two sources disagree, or a value is invalid.
    """
    from hubring.ps.config.environment import environment
    from hubring.ps.config.sources import load_worker, worker_origins
    from hubring.workers.launchers.placement import FAMILIES, absent, detect, set_aside
    from hubring.workers.runtime.topology import choose_device

    config, origins = load_worker(flags, config_file), worker_origins(flags, config_file)
    variables = environment()
    here = detect(variables, config.rank, config.world_size, config.local_rank, socket.gethostname())
    sources = {reading.field: reading.source for reading in reversed(here.readings)}
    sources.update({field: origins[name] for field, name in _SETTINGS.items() if name in origins})
    choice = choose_device(config.backend, config.accelerator, here, variables)
    # None: only the server knows it.
    values: dict[str, tuple[int | str | None, str]] = {
        "rank": (here.rank, sources.get("rank", "not set: the server assigns it")),
        "world size": (here.size, sources.get("size", "not set: the server's --workers, or 1")),
        "local rank": (here.local_rank, sources.get("local_rank", "default")),
        "local size": (here.local_size, sources.get("local_size", "default")),
        "node rank": (here.node_rank, sources.get("node_rank", "rank divided by local size")),
        "restart": (here.restart, sources.get("restart", "default")),
        "launcher": (here.launcher, _launcher_source(variables, here.launcher)),
        "server": (config.server, origins.get("server", "not set: this worker trains alone")),
        "device": (choice.device, choice.why),
        "threads": _threads(variables, here.local_size),
    }
    return {
        **{name: {"value": value, "source": source} for name, (value, source) in values.items()},
        "set aside": list(set_aside(variables)),
        "absent": {family: list(names) for family, names in absent(variables).items()},
        "notes": [*(family.note for family in FAMILIES if family.note), COMPOSE_NOTE],
    }


def lines(report: Mapping[str, Any], explain: bool) -> list[str]:
    """Returns the report as lines of text."""
    values = {name: part for name, part in report.items() if isinstance(part, dict) and "source" in part}
    shown = {name: "-" if part["value"] is None else str(part["value"]) for name, part in values.items()}
    if not explain:
        return [f"{name:<11} {value}" for name, value in shown.items()]
    width = max(map(len, shown.values()))
    text = [f"{name:<11} {shown[name]:<{width}}  {part['source']}" for name, part in values.items()]
    text += [f"ignored     {source}  (set by an outer launcher)" for source in report["set aside"]]
    text += [f"not set     {family}: {', '.join(names)}" for family, names in report["absent"].items()]
    return [*text, *(f"note        {note}" for note in report["notes"])]


COMPOSE_NOTE = "a Compose replica cannot see its own number; the hub assigns its rank"
_SETTINGS = {"rank": "rank", "size": "world_size", "local_rank": "local_rank"}


def _launcher_source(variables: Mapping[str, str], launcher: str) -> str:
    from hubring.workers.launchers.placement import FAMILIES

    for family in FAMILIES:
        if family.started(variables):
            name = next(name for name in family.names if name in variables)
            return f"{name}={variables[name]}"
    found = {"environment": "RANK or the like, no known launcher", "kubernetes": "the hostname of a pod"}
    return found.get(launcher, "no launcher's variables are set")


def _threads(variables: Mapping[str, str], local_size: int) -> tuple[int, str]:
    """Shares the cores as `runtime.topology` does, but only by `local_size`.

    Only the server knows how many workers run on this host.
    """
    if "OMP_NUM_THREADS" in variables:
        import torch

        return torch.get_num_threads(), f"OMP_NUM_THREADS={variables['OMP_NUM_THREADS']}"
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // local_size), f"{cores} core(s) for {local_size} local worker(s)"


if __name__ == "__main__":
    main()

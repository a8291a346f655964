"""`ps-server`: start a hub, print its status, write a checkpoint, submit a job, check this machine.

This module imports only typer and the settings, so that `--help` is fast.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from hubring.ps.config import terminal
from hubring.ps.config.environment import silence_grpc
from hubring.ps.config.server import ServerConfig
from hubring.ps.config.submit import SubmitConfig
from hubring.ps.config.terminal import CommandWithGroups, ConfigFile, named, options, takes
from hubring.ps.config.worker import WorkerConfig

_OF_SERVER = (
    *("shards", "colocate", "mode", "staleness", "backup"),
    *("checkpoint_dir", "checkpoint_every", "on_loss", "lease"),
)
_OF_WORKER = (
    *("topology", "backend", "aggregate", "local", "compress", "transport"),
    *("job", "save_parameters", "log_format"),
)
"""Flags of `submit` that it passes to the server or to the workers."""

_TLS = ("tls_cert", "tls_key", "tls_ca")
_CLIENT = tuple(options(WorkerConfig, ["token_file", "insecure", *_TLS], reads_variables=True))
"""Options of a command that calls a server."""

T = TypeVar("T")

app = typer.Typer(
    help="Run a hub: the parameter server, and the rendezvous of a ring.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

tokens = typer.Typer(help="Show, make or replace the tokens of a server.", no_args_is_help=True)
app.add_typer(tokens, name="token")

Address = Annotated[str, typer.Argument(help="HOST:PORT of the server, from its banner")]


@app.callback()
def program(version: Annotated[bool, terminal.version_option()] = False) -> None:
    """Takes the options in front of a command."""


@app.command(cls=CommandWithGroups)
@takes(options(ServerConfig))
def start(config: ConfigFile = None, **flags: object) -> None:
    """Start a hub and its shards; the banner prints the worker's command."""
    _run(lambda: _start(flags, config))


@app.command(cls=CommandWithGroups)
@takes(_CLIENT)
def status(
    server: Address,
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON object, as without a terminal")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="refresh it each second until Ctrl-C; needs a terminal")
    ] = False,
    **access: Any,
) -> None:
    """Print the status of a hub: as tables on a terminal, otherwise as one JSON object."""
    _run(lambda: _status(server, access, as_json=as_json or not sys.stdout.isatty(), watch=watch))


@app.command(cls=CommandWithGroups)
@takes(_CLIENT)
def health(
    server: Address,
    service: Annotated[
        str, typer.Option(help="hubring.v1.Control, hubring.v1.Data or ready [default: the process]")
    ] = "",
    **access: Any,
) -> None:
    """Check whether a hub or one of its services is serving; for container health checks.

    Exits with 0 if it is serving, with 69 if it is not.
    """
    _run(lambda: _health(server, service, access))


@app.command(cls=CommandWithGroups)
@takes(_CLIENT)
def checkpoint(server: Address, **access: Any) -> None:
    """Make a hub write a checkpoint now."""
    _run(lambda: _checkpoint(server, access))


@tokens.command("show", cls=CommandWithGroups)
@takes(options(WorkerConfig, ["token_file"], reads_variables=True))
def show_token(
    server: Annotated[str | None, typer.Argument(help="HOST:PORT of your server on this host")] = None,
    role: Annotated[str, typer.Option(help="worker, shard, reader or operator: show only this token")] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            callback=named("--output"),
            help="write to this file instead, which only you can read",
        ),
    ] = None,
    **access: Any,
) -> None:
    """Print a server's tokens, one in each line. For another host, write them to a file with --output."""
    from hubring.ps.security.keyring import show_tokens

    _run(lambda: show_tokens(server, access["token_file"], role, output) or 0)


@tokens.command("new")
def new_token(
    file: Annotated[
        Path, typer.Argument(callback=named("FILE"), help="file to write, and FILE.key beside it")
    ],
) -> None:
    """Make tokens and a certificate for a server that starts later, with --token-file FILE."""
    from hubring.ps.security.keyring import make_files

    _run(lambda: {"tokens": str(make_files(file))})


@tokens.command("rotate", cls=CommandWithGroups)
@takes(_CLIENT)
def rotate_token(server: Address, **access: Any) -> None:
    """Replace the tokens of a running server. Workers and shards that have joined stay."""
    _run(lambda: {"tokens": _act(server, access, "RotateToken", 10).path})


@app.command(cls=CommandWithGroups)
@takes(options(ServerConfig, ["checkpoint_dir", "token_file", "insecure", *_TLS]))
def doctor(
    server: Annotated[
        str | None, typer.Argument(help="HOST:PORT of a running server; also checks the connection to it")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="time limit for the checks, in seconds")] = 12.0,
    config: ConfigFile = None,
    **flags: object,
) -> None:
    """Check whether a job can run on this machine, and suggest a fix for each problem.

    Exits with 0 if no check fails, with 69 if only the server is unreachable, with 78 if this machine fails.
    """
    terminal.unwind_on_sigterm()
    _run(lambda: _doctor(server, flags, config, timeout))


@app.command(cls=CommandWithGroups, context_settings={"allow_interspersed_args": False})
@takes(options(SubmitConfig), options(ServerConfig, _OF_SERVER), options(WorkerConfig, _OF_WORKER))
def submit(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- SCRIPT ARGS...]", help="your script and its arguments [default: a built-in --job]"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the engine's input, and submit nothing")
    ] = False,
    config: ConfigFile = None,
    **flags: object,
) -> None:
    """Submit a job (a server and its workers) to SLURM, Kubernetes or Compose.

    Set other options in the TOML file's tables or with PS_* variables.
    """
    from hubring.ps.submit import engine

    _run(lambda: engine.submit(flags, command or [], config, dry_run=dry_run))


def main() -> None:
    """Runs `ps-server`; the console script's entry point."""
    silence_grpc()
    terminal.run(app, "ps-server")


def _start(flags: dict[str, object], config_file: Path | None) -> dict[str, Any] | int:
    import asyncio

    from hubring.ps.config.environment import environment
    from hubring.ps.config.sources import load_server
    from hubring.ps.core.bounds import raise_descriptor_limit
    from hubring.ps.observe import logs
    from hubring.ps.process.launch import PARENT_VARIABLE, end_with_parent
    from hubring.ps.process.restarts import as_child, is_supervised

    config = load_server(flags, config_file)
    guards = config.standby and config.join is None
    if config.restarts and not guards and not is_supervised(environment()):
        begin = as_child("ps-server", "hubring.ps.cli", environment())
        return _start_again_and_again(config, begin)
    end_with_parent(int(environment().get(PARENT_VARIABLE, 0)))
    logs.configure(config.log_format).role = "hub"
    raise_descriptor_limit()  # children inherit it
    if config.device != "cpu":
        from hubring.ps.store.parameter_memory import find_gpu

        find_gpu(config.device)  # raises here if there is no GPU, before any process starts
    if guards:
        from hubring.ps.recovery.guardian import Guarded, guard

        if config.restarts:  # without a process in between, which would be taken for the server
            return _start_again_and_again(config, lambda: Guarded(config, _conclude))
        _conclude(ended := guard(config))
        return ended.exit_code
    from hubring.ps.server import Server
    from hubring.ps.shard.host_shards import join

    if config.join is not None:
        code = asyncio.run(_until_exit(join(config)))
        return {"joined": config.join, "shards": config.shards, "exit_code": code}
    code, result = asyncio.run(_until_exit(Server(config).run()))
    return {**result, "exit_code": code}


def _conclude(ended: Any) -> None:
    """Prints how a server with standbys ended."""
    if ended.error:
        print(f"ps-server: {ended.error}", file=sys.stderr)
    terminal.last_line(ended.result)


def _start_again_and_again(config: Any, begin: Any) -> int:
    from hubring.ps.checkpoint.checkpoint_folder import newest_step
    from hubring.ps.process.restarts import Restarts, supervise

    folder = config.checkpoint_dir

    def start() -> str:
        step = newest_step(folder) if folder is not None else None
        return "without a checkpoint" if step is None else f"from the checkpoint of step {step}"

    return supervise("ps-server", begin, Restarts(config.restarts), start)


async def _until_exit(work: Awaitable[T]) -> T:
    """Awaits what a server does, and then ignores signals: a loop that closes would let them kill."""
    import asyncio
    import signal

    from hubring.ps.process.launch import STOP_SIGNALS

    try:
        return await work
    finally:
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


def _status(server: str, access: dict[str, Any], *, as_json: bool, watch: bool) -> dict[str, Any] | int:
    from hubring.protos import control_pb2 as pb
    from hubring.ps.core.errors import UsageError

    def read() -> dict[str, Any]:
        answer = _ask(server, "reader", access, lambda stub: stub.Status(pb.StatusRequest(), timeout=10))
        report: dict[str, Any] = json.loads(answer.json)
        return report

    if watch and as_json:
        raise UsageError("--watch needs a terminal and excludes --json; ps-server status prints JSON once")
    if as_json:
        return read()
    from hubring.ps.observe import status_table

    status_table.watch(read) if watch else status_table.show(read())
    return 0


def _health(server: str, service: str, access: dict[str, Any]) -> dict[str, Any]:
    from hubring.ps.observe.health import probe

    _connect(server, "reader", access, lambda channel: probe(channel, server, service))
    return {"address": server, "service": service, "serving": True}


def _checkpoint(server: str, access: dict[str, Any]) -> dict[str, Any]:
    reply = _act(server, access, "Checkpoint", 120)
    return {"checkpoint": reply.path, "step": reply.step}


def _act(server: str, access: dict[str, Any], method: str, seconds: float) -> Any:
    """Returns the reply to an operator's call, if it is not refused."""
    from hubring.protos import control_pb2 as pb
    from hubring.ps.core.errors import ConfigError

    request = getattr(pb, f"{method}Request")()
    reply = _ask(server, "operator", access, lambda stub: getattr(stub, method)(request, timeout=seconds))
    if reply.refused:
        raise ConfigError(reply.refused)
    return reply


def _doctor(
    server: str | None, flags: dict[str, object], config_file: Path | None, seconds: float
) -> dict[str, Any]:
    from hubring.ps.config.environment import environment
    from hubring.ps.config.values import address
    from hubring.ps.doctor.check import Subject, announce_checks, findings_result, settled, show_findings
    from hubring.ps.doctor.checks import examine

    if server is not None:
        address(server)
    variables = environment()
    config = settled(flags, config_file, variables)
    announce_checks(server, seconds)
    findings = examine(Subject(config, config_file, server, variables, seconds))
    show_findings(findings)
    return findings_result(server, findings)


def _own(tls: dict[str, Any]) -> Any:
    from hubring.ps.config.declaration import TlsFiles
    from hubring.ps.security.certificate import load_certificate

    return load_certificate(TlsFiles(*(tls[name] for name in _TLS)), serves=False)


def _ask(server: str, role: str, access: dict[str, Any], call: Any) -> Any:
    from hubring.protos.control_pb2_grpc import ControlStub
    from hubring.ps.transport.grpc.calls import whole

    return _connect(server, role, access, lambda channel: whole(call(ControlStub(channel))))


AGAIN_SECONDS = 2.0
"""How long a program that only reads calls again: a server that strangers crowd may close its connection."""


def _connect(server: str, role: str, access: dict[str, Any], use: Callable[[Any], T]) -> T:
    import grpc

    from hubring.ps.config.values import address
    from hubring.ps.core.errors import ServerUnreachable
    from hubring.ps.security.access import find_access, look_seconds, refused_error
    from hubring.ps.security.guard import Role
    from hubring.ps.transport.grpc.calls import describe, details
    from hubring.ps.transport.grpc.channel import open_channel

    address(server)
    try:
        seconds, insecure = look_seconds(server), access["insecure"]
        found = find_access(
            server, Role(role), access["token_file"], seconds, _own(access), insecure=insecure
        )
    except ServerUnreachable as error:
        raise _silent(server) from error
    deadline = time.monotonic() + AGAIN_SECONDS
    while True:
        try:
            with open_channel(server, found) as channel:
                return use(channel)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise refused_error(server, details(error)) from error
            lost = role == "reader" and error.code() is grpc.StatusCode.UNAVAILABLE
            if not lost or time.monotonic() > deadline:
                raise _silent(server, f" ({describe(error)})") from error
        time.sleep(0.1)


def _silent(server: str, detail: str = "") -> Exception:
    from hubring.ps.core.errors import ServerUnreachable
    from hubring.ps.transport.host import probe, start_command

    return ServerUnreachable(
        f"no server answers at {server}: {probe(server)}{detail}; check the address, or start one:"
        f" {start_command(server)}; to diagnose: ps-server doctor {server}"
    )


def _run(action: Callable[[], dict[str, Any] | int]) -> None:
    """Exits with the code of the action or of its error; the last line is the result, if there is one."""
    raise SystemExit(terminal.conclude("ps-server", action))


if __name__ == "__main__":
    main()

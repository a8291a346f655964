"""`ps-server`: start a hub, ask it how it goes, make it save, submit a job, find out what is wrong.

Only typer is imported here, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hubring.ps.config import terminal

app = typer.Typer(
    help="The hub: a parameter server, and the meeting point of the ring.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Address = Annotated[str, typer.Argument(help="the server's HOST:PORT, as its banner names it")]


@app.command()
def start(
    host: Annotated[str | None, typer.Option(help="address to listen on [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="control port, 0 for a free one [5555]")] = None,
    page_port: Annotated[
        int | None, typer.Option(help="port of the status page and of /metrics [the one after --port]")
    ] = None,
    no_page: Annotated[bool | None, typer.Option("--no-page", help="neither page nor metrics")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="file with the token for the page's buttons [one is drawn]")
    ] = None,
    shards: Annotated[int | None, typer.Option(help="shard processes on this host [1]")] = None,
    await_shards: Annotated[
        int | None, typer.Option(help="shards of other hosts that a job waits for, see --join [0]")
    ] = None,
    colocate: Annotated[
        bool | None, typer.Option("--colocate", help="no shards here: each worker brings one")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="workers of the job [as their launcher says]")] = None,
    mode: Annotated[str | None, typer.Option(help="bsp, asp, ssp or backup [bsp]")] = None,
    staleness: Annotated[int | None, typer.Option(help="ssp: steps the fastest may lead [0]")] = None,
    backup: Annotated[int | None, typer.Option(help="backup: workers not waited for")] = None,
    nonfinite: Annotated[
        str | None, typer.Option(help="NaN or infinite gradients: refuse or allow [refuse]")
    ] = None,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="write checkpoints here, resume from here")
    ] = None,
    checkpoint_every: Annotated[float | None, typer.Option(help="seconds between checkpoints [60]")] = None,
    once: Annotated[bool | None, typer.Option("--once", help="end when the first job ends")] = None,
    join: Annotated[str | None, typer.Option(help="serve this host's shards to the hub at HOST:PORT")] = None,
    on_loss: Annotated[str | None, typer.Option(help="a worker is lost: drop it, or wait [drop]")] = None,
    lease: Annotated[
        float | None, typer.Option(help="seconds of silence until it counts as lost [8]")
    ] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="listen beyond loopback without credentials")
    ] = None,
    address_file: Annotated[Path | None, typer.Option(help="write HOST:PORT here once listening")] = None,
    device: Annotated[str | None, typer.Option(help="where shards step: cpu, cuda or cuda:N [cpu]")] = None,
    slice_bytes: Annotated[int | None, typer.Option(help="largest piece that travels [tuned]")] = None,
    trace: Annotated[Path | None, typer.Option(help="folder: what shards do when, for Perfetto")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json [text]")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with a [server] table")] = None,
) -> None:
    """Start a hub and its shards; the banner prints the worker's command."""
    flags = dict(locals())
    config_file = flags.pop("config")
    _run(lambda: _start(flags, config_file))


@app.command()
def status(server: Address) -> None:
    """Print how a hub is doing, as one JSON object."""
    _run(lambda: (0, _status(server)))


@app.command()
def health(
    server: Annotated[str, typer.Argument(help="HOST:PORT of a hub, or of a shard as its status names it")],
    service: Annotated[
        str, typer.Option(help="hubring.v1.Control, hubring.v1.Data or ready [the process]")
    ] = "",
) -> None:
    """End with 0 if a hub or one of its services is serving, else with 69: for a container's health check."""
    _run(lambda: (0, _health(server, service)))


@app.command()
def checkpoint(server: Address) -> None:
    """Make a hub write a checkpoint now."""
    _run(lambda: (0, _checkpoint(server)))


@app.command()
def doctor(
    server: Annotated[
        str | None, typer.Argument(help="HOST:PORT of a running server: look at the way to it too")
    ] = None,
    checkpoint_dir: Annotated[Path | None, typer.Option(help="where a server here would save")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds that the checks may take")] = 12.0,
    config: Annotated[Path | None, typer.Option(help="TOML file with a [server] table")] = None,
) -> None:
    """Look for what would keep a job from running here, and name each mend.

    Ends with 0 if nothing failed, with 69 if only the server is missing, with 78 if this machine fails.
    """
    terminal.unwind_on_sigterm()
    flags: dict[str, object] = {"checkpoint_dir": checkpoint_dir}
    raise SystemExit(terminal.conclude("ps-server", lambda: _doctor(server, flags, config, timeout)))


@app.command(context_settings={"allow_interspersed_args": False})
def submit(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- SCRIPT ARGS...]", help="your script and its arguments; none: --job"),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="slurm, kubernetes or compose")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what the engine would read, and nothing else")
    ] = False,
    workers: Annotated[int | None, typer.Option(help="workers in all [one a GPU]")] = None,
    nodes: Annotated[int | None, typer.Option(help="hosts, or pods, that share them evenly")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of each node, one worker each [none]")] = None,
    cpus: Annotated[int | None, typer.Option(help="cores of each worker [2 in a container]")] = None,
    memory: Annotated[int | None, typer.Option(help="GiB of each worker [4 in a container]")] = None,
    job_name: Annotated[str | None, typer.Option(help="what the engine calls the job [hubring]")] = None,
    image: Annotated[str | None, typer.Option(help="kubernetes, compose: the image with your script")] = None,
    kind: Annotated[str | None, typer.Option(help="kubernetes: jobset or trainjob [jobset]")] = None,
    time: Annotated[str | None, typer.Option(help="at most so long: [DAYS-]HH:MM:SS")] = None,
    partition: Annotated[str | None, typer.Option(help="slurm: partitions, one of which takes it")] = None,
    requeue: Annotated[
        bool | None, typer.Option("--requeue", help="pre-empted (75): start again and go on")
    ] = None,
    engine_option: Annotated[
        list[str] | None, typer.Option(help="slurm: one more line, as in '#SBATCH --account=a'; repeatable")
    ] = None,
    shards: Annotated[int | None, typer.Option(help="shard processes beside the server [1]")] = None,
    colocate: Annotated[
        bool | None, typer.Option("--colocate", help="no shards there: each worker brings one")
    ] = None,
    mode: Annotated[str | None, typer.Option(help="bsp, asp, ssp or backup [bsp]")] = None,
    staleness: Annotated[int | None, typer.Option(help="ssp: steps the fastest may lead [0]")] = None,
    backup: Annotated[int | None, typer.Option(help="backup: workers not waited for")] = None,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="save there and resume from there; in a container, a volume")
    ] = None,
    checkpoint_every: Annotated[float | None, typer.Option(help="seconds between checkpoints [60]")] = None,
    on_loss: Annotated[str | None, typer.Option(help="a worker is lost: drop it, or wait [drop]")] = None,
    lease: Annotated[
        float | None, typer.Option(help="seconds of silence until it counts as lost [8]")
    ] = None,
    topology: Annotated[str | None, typer.Option(help="hub or ring [hub]")] = None,
    backend: Annotated[str | None, typer.Option(help="of the ring: gloo or nccl [gloo]")] = None,
    aggregate: Annotated[
        bool | None, typer.Option("--aggregate", help="the hub averages, each worker's optimizer steps")
    ] = None,
    compress: Annotated[
        str | None, typer.Option(help="gradients: bf16, fp16, int8, sign, topk:0.01 or powersgd:4")
    ] = None,
    transport: Annotated[str | None, typer.Option(help="to the hub: auto, shm, zmq or grpc [auto]")] = None,
    job: Annotated[str | None, typer.Option(help="without a script: digits or char-lm [digits]")] = None,
    save_parameters: Annotated[Path | None, typer.Option(help="rank 0 writes the last ones here")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json [text]")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file: [submit], [server] and [worker]")] = None,
) -> None:
    """Hand a job to SLURM, Kubernetes or Compose: the server, its workers, and how they find each other.

    What is not a flag here may stand in the TOML file's tables, or in PS_* of the environment.
    """
    flags = dict(locals())
    script = flags.pop("command") or []
    config_file, dry = flags.pop("config"), flags.pop("dry_run")
    flags["engine_option"] = engine_option or None
    _run(lambda: _submit(flags, script, config_file, dry))


def main() -> None:
    """Console entry of `ps-server`."""
    terminal.run(app, "ps-server")


def _start(flags: dict[str, object], config_file: Path | None) -> tuple[int, dict[str, Any]]:
    import asyncio

    from hubring.ps.config.sources import load_server
    from hubring.ps.observe import logs
    from hubring.ps.server import Server, join

    config = load_server(flags, config_file)
    logs.configure(config.log_format).role = "hub"
    if config.device != "cpu":
        from hubring.ps.shard import gpu

        gpu.find(config.device)  # said here, before anything is started
    if config.join is not None:
        code = asyncio.run(join(config))
        return code, {"joined": config.join, "shards": config.shards, "exit_code": code}
    return asyncio.run(_serve(Server(config)))


async def _serve(server: Any) -> tuple[int, dict[str, Any]]:
    code, result = await server.run()
    return code, {**result, "exit_code": code}


def _submit(
    flags: dict[str, object], script: list[str], config_file: Path | None, dry_run: bool
) -> tuple[int, dict[str, Any] | None]:
    from hubring.ps.submit.engines import submit

    return submit(flags, script, config_file, dry_run=dry_run)


def _status(server: str) -> dict[str, Any]:
    from hubring.protos import control_pb2 as pb

    report: dict[str, Any] = json.loads(
        _ask(server, lambda stub: stub.Status(pb.StatusRequest(), timeout=10)).json
    )
    return report


def _health(server: str, service: str) -> dict[str, Any]:
    from hubring.ps.observe.health_check import probe

    probe(server, service)
    return {"address": server, "service": service, "serving": True}


def _checkpoint(server: str) -> dict[str, Any]:
    from hubring.protos import control_pb2 as pb
    from hubring.ps.core.errors import ConfigError

    reply = _ask(server, lambda stub: stub.Checkpoint(pb.CheckpointRequest(), timeout=120))
    if reply.refused:
        raise ConfigError(reply.refused)
    return {"checkpoint": reply.path, "step": reply.step}


def _doctor(
    server: str | None, flags: dict[str, object], config_file: Path | None, seconds: float
) -> dict[str, Any]:
    from hubring.ps.config.address import address
    from hubring.ps.config.environment import environment
    from hubring.ps.doctor.checks import checks
    from hubring.ps.doctor.finding import result
    from hubring.ps.doctor.isolation import examine
    from hubring.ps.doctor.screen import announce, show
    from hubring.ps.doctor.subject import Subject, settled

    if server is not None:
        address(server)
    variables = environment()
    config = settled(flags, config_file, variables)
    announce(server, seconds)
    findings = examine(checks(Subject(config, config_file, server, variables, seconds)), seconds)
    show(findings)
    return result(server, findings)


def _ask(server: str, call: Any) -> Any:
    import grpc

    from hubring.protos.control_pb2_grpc import ControlStub
    from hubring.ps.config.address import address
    from hubring.ps.core.errors import ServerUnreachable
    from hubring.ps.transport.grpc.channel import open_channel
    from hubring.ps.transport.port_probe import probe

    _, port = address(server)
    with open_channel(server) as channel:
        try:
            return call(ControlStub(channel))
        except grpc.RpcError as error:
            raise ServerUnreachable(
                f"no server answers at {server}: {probe(server)} ({error.code().name}: {error.details()});"
                f" check the address, or start one: ps-server start --port {port}; ps-server doctor"
                f" {server} tells more"
            ) from error


def _run(action: Any) -> None:
    """Ends the program with the action's code, or its error's; the last line is the result, if it has one."""
    from hubring.ps.core.errors import HubringError

    try:
        code, result = action()
    except HubringError as error:
        print(f"ps-server: {error}", file=sys.stderr)
        code, result = error.exit_code, {"error": str(error), "exit_code": error.exit_code}
    if result is not None:
        terminal.last_line(result)
    raise SystemExit(code)


if __name__ == "__main__":
    main()

"""`ps-server`: start a hub, ask it how it goes, make it save.

Only typer is imported here, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ps import terminal

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
    colocate: Annotated[
        bool | None, typer.Option("--colocate", help="no shards here: each worker brings one")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="workers of the job [as their launcher says]")] = None,
    mode: Annotated[str | None, typer.Option(help="bsp, asp, ssp or backup [bsp]")] = None,
    staleness: Annotated[int | None, typer.Option(help="ssp: steps the fastest may lead")] = None,
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
        float | None, typer.Option(help="seconds of silence until it counts as lost [5]")
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
def checkpoint(server: Address) -> None:
    """Make a hub write a checkpoint now."""
    _run(lambda: (0, _checkpoint(server)))


def main() -> None:
    """Console entry of `ps-server`."""
    terminal.run(app, "ps-server")


def _start(flags: dict[str, object], config_file: Path | None) -> tuple[int, dict[str, Any]]:
    import asyncio

    from ps import logs
    from ps.config import load_server
    from ps.server import Server, join

    config = load_server(flags, config_file)
    logs.configure(config.log_format).role = "hub"
    if config.device != "cpu":
        from ps import gpu

        gpu.find(config.device)  # said here, before anything is started
    if config.join is not None:
        code = asyncio.run(join(config))
        return code, {"joined": config.join, "shards": config.shards, "exit_code": code}
    return asyncio.run(_serve(Server(config)))


async def _serve(server: Any) -> tuple[int, dict[str, Any]]:
    code, result = await server.run()
    return code, {**result, "exit_code": code}


def _status(server: str) -> dict[str, Any]:
    from protos import control_pb2 as pb

    report: dict[str, Any] = json.loads(
        _ask(server, lambda stub: stub.Status(pb.StatusRequest(), timeout=10)).json
    )
    return report


def _checkpoint(server: str) -> dict[str, Any]:
    from protos import control_pb2 as pb
    from ps.errors import ConfigError

    reply = _ask(server, lambda stub: stub.Checkpoint(pb.CheckpointRequest(), timeout=120))
    if reply.refused:
        raise ConfigError(reply.refused)
    return {"checkpoint": reply.path, "step": reply.step}


def _ask(server: str, call: Any) -> Any:
    import grpc

    from protos.control_pb2_grpc import ControlStub
    from ps.config import address
    from ps.errors import ServerUnreachable
    from ps.transport.channel import open_channel
    from ps.transport.probe import probe

    address(server)
    with open_channel(server) as channel:
        try:
            return call(ControlStub(channel))
        except grpc.RpcError as error:
            raise ServerUnreachable(
                f"no server answers at {server}: {probe(server)} ({error.code().name}: {error.details()});"
                " check the address, or start one: ps-server start"
            ) from error


def _run(action: Any) -> None:
    """Ends the program with the action's code, or its error's; the last line is the result."""
    from ps.errors import HubringError

    try:
        code, result = action()
    except HubringError as error:
        print(f"ps-server: {error}", file=sys.stderr)
        code, result = error.exit_code, {"error": str(error), "exit_code": error.exit_code}
    terminal.last_line(result)
    raise SystemExit(code)


if __name__ == "__main__":
    main()

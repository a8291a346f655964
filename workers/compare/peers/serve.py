"""A server of a peer's row; ends when all workers have left: `python -m ...compare.peers.serve`."""

from __future__ import annotations

import secrets
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from hubring.ps.config import terminal
from hubring.ps.core.errors import UsageError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

PROGRAM = "peer-server"


@app.command()
def serve(
    peer: Annotated[str, typer.Option(help="rpc or ray")],
    world_size: Annotated[int, typer.Option(help="how many workers there are")],
    meet: Annotated[str, typer.Option(help="HOST:PORT, or a file that all see; ray writes it")],
    number: Annotated[int, typer.Option(help="of rpc: which server this is")] = 0,
    servers: Annotated[int, typer.Option(help="of rpc: how many servers there are")] = 1,
    host: Annotated[str | None, typer.Option(help="own address: talk through its interface alone")] = None,
) -> None:
    """Hold a model for the workers of somebody else's way to train."""

    def act() -> dict[str, Any]:
        if peer == "rpc":
            _serve_rpc(number, servers, world_size, meet, host)
        elif peer == "ray":
            _serve_ray(world_size, Path(meet))
        else:
            raise UsageError(f"--peer {peer}: rpc and ray have servers")
        return {"peer": peer, "number": number, "exit_code": 0}

    raise SystemExit(terminal.conclude(PROGRAM, act))


def _serve_rpc(number: int, servers: int, workers: int, meet: str, host: str | None) -> None:
    import torch
    from torch.distributed import rpc

    from hubring.workers.compare.peers.peer import Seat
    from hubring.workers.compare.peers.rpc import join, server_of

    torch.set_num_threads(1)  # as a shard does
    seat = Seat(rank=0, size=workers, meet=meet, host=host, servers=servers)
    join(server_of(number), number, seat)
    rpc.shutdown()


def _serve_ray(workers: int, meet: Path) -> None:
    from hubring.workers.compare.peers.ray import ACTOR, NAMESPACE, use_token

    token = use_token(meet)
    token.touch(0o600)
    token.write_text(secrets.token_hex())
    import ray

    from hubring.workers.compare.peers.ray_server import Server

    with TemporaryDirectory(prefix="hubring-ray-", ignore_cleanup_errors=True) as place:
        own: dict[str, Any] = {"_node_ip_address": "127.0.0.1", "_temp_dir": place}
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}
        ray.init(namespace=NAMESPACE, **own, **quiet)
        terminal.unwind_on_sigterm()
        try:
            server = ray.remote(Server).options(name=ACTOR, num_cpus=0).remote(workers)
            meet.write_text(ray.get_runtime_context().gcs_address)
            ray.get(server.end.remote())
        finally:
            ray.shutdown()  # with it go all processes of the cluster
            token.unlink()


def main() -> None:
    """Entry of the program."""
    terminal.run(app, PROGRAM)


if __name__ == "__main__":
    main()

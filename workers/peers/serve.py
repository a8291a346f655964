"""A server of a peer's row: `python -m hubring.workers.peers.serve`. It ends when all workers have left."""

from __future__ import annotations

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
        from hubring.workers.peers import ray, rpc
        from hubring.workers.peers.seat import Seat

        seat = Seat(rank=0, size=world_size, meet=meet, host=host, servers=servers)
        if peer == "rpc":
            rpc.serve(number, seat)
        elif peer == "ray":
            ray.serve(seat)
        else:
            raise UsageError(f"--peer {peer}: rpc and ray have servers")
        return {"peer": peer, "number": number, "exit_code": 0}

    raise SystemExit(terminal.conclude(PROGRAM, act))


def main() -> None:
    """Entry of the program."""
    terminal.run(app, PROGRAM)


if __name__ == "__main__":
    main()

"""A peer's server: `python -m hubring.workers.peers.serve`. It ends when all workers have left."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hubring.ps.config import terminal
from hubring.ps.core.errors import UsageError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

PROGRAM = "peer-server"


@app.command()
@terminal.concludes(PROGRAM)
def serve(
    peer: Annotated[str, typer.Option(help="rpc or ray")],
    world_size: Annotated[int, typer.Option(help="number of workers")],
    meet: Annotated[str, typer.Option(help="rendezvous: HOST:PORT, or a shared file; ray writes the file")],
    number: Annotated[int, typer.Option(help="rpc: index of this server")] = 0,
    servers: Annotated[int, typer.Option(help="rpc: number of servers")] = 1,
    host: Annotated[str | None, typer.Option(help="address of the only interface to use")] = None,
) -> dict[str, Any]:
    """Run a parameter server of a peer library."""
    from hubring.workers.peers import ray, rpc
    from hubring.workers.peers.rendezvous import PeerRendezvous

    seat = PeerRendezvous(rank=0, size=world_size, meet=meet, host=host, servers=servers)
    if peer == "rpc":
        rpc.serve(number, seat)
    elif peer == "ray":
        ray.serve(seat)
    else:
        raise UsageError(f"--peer {peer}: expected rpc or ray")
    return {"peer": peer, "number": number, "exit_code": 0}


def main() -> None:
    """Entry of the program."""
    terminal.run(app, PROGRAM)


if __name__ == "__main__":
    main()

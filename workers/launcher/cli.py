"""`ps-run`: one command for a job on this machine, with `horovodrun`'s most used flags.

Only typer is imported here, so that `--help` answers at once.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from ps import terminal

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGS]...", help="your script, as such or behind python"),
    ] = None,
    num_proc: Annotated[
        int | None, typer.Option("-np", "--num-proc", min=1, help="workers [the hosts' slots, else 1]")
    ] = None,
    hosts: Annotated[str | None, typer.Option("-H", "--hosts", help="localhost:SLOTS")] = None,
    hostfile: Annotated[Path | None, typer.Option(help="file with a line as localhost slots=4")] = None,
    topology: Annotated[str, typer.Option(help="hub or ring")] = "hub",
    backend: Annotated[str | None, typer.Option(help="of the ring: gloo or nccl [gloo]")] = None,
    transport: Annotated[str | None, typer.Option(help="to the hub: auto, shm, zmq or grpc [auto]")] = None,
    aggregate: Annotated[
        bool, typer.Option("--aggregate", help="the hub averages, the workers' optimizers step")
    ] = False,
    shards: Annotated[int, typer.Option(min=1, help="shard processes of the hub")] = 1,
    output_filename: Annotated[
        Path | None, typer.Option(help="folder: outputs also go to rank.N/stdout and rank.N/stderr in it")
    ] = None,
    timeline_filename: Annotated[
        str | None, typer.Option(help="rank 0 writes a trace of Horovod's operations here")
    ] = None,
    start_timeout: Annotated[float, typer.Option(help="seconds in which all must have started")] = 300.0,
    verbose: Annotated[bool, typer.Option("--verbose", help="show the server's log")] = False,
    check_build: Annotated[
        bool, typer.Option("-cb", "--check-build", help="print what there is here, and end")
    ] = False,
) -> None:
    """Start a server and workers on this machine, and run a script on them.

    The script may be written to workers, or to horovod.torch. Each line of its output is marked with
    its rank. When one worker fails, all are ended; the exit code is the first failure's.
    """
    flags = dict(locals())
    raise SystemExit(_check_build() if flags.pop("check_build") else _run(flags))


def main() -> None:
    """Console entry of `ps-run`."""
    terminal.run(app, "ps-run")


def _check_build() -> int:
    from workers.horovod.build import check_build

    print(check_build())
    return 0


def _run(flags: dict[str, object]) -> int:
    from ps.errors import HubringError
    from workers.launcher.job import LocalJob

    try:
        words = script(flags.pop("command"))
        return LocalJob(**flags).run(words)  # type: ignore[arg-type]
    except HubringError as error:
        print(f"ps-run: {error}", file=sys.stderr)
        return error.exit_code


def script(words: object) -> list[str]:
    """Script and arguments of a command; `python` and `-u` before them change nothing.

    Raises:
        UsageError: There is no script.
    """
    from ps.errors import UsageError

    left = list(words) if isinstance(words, list | tuple) else []
    if left and re.fullmatch(r"python(3(\.\d+)?)?", Path(left[0]).name):
        left = left[1:]
        left = left[1:] if left[:1] == ["-u"] else left
    if not left or left[0].startswith("-"):
        given = f"{left[0]!r} is none" if left else "there is none"
        raise UsageError(f"ps-run needs a script, and {given}: ps-run -np 2 train.py [ARGS]...")
    return left


if __name__ == "__main__":
    main()

"""`ps-run`: one command for a job on this machine, with `horovodrun`'s most used flags.

Only typer is imported here, so that `--help` answers at once.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from hubring.ps.config import terminal

Switch = Annotated[bool | None, typer.Option(hidden=True)]
Value = Annotated[str | None, typer.Option(hidden=True)]

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
    hostfile: Annotated[
        Path | None, typer.Option("-hostfile", "--hostfile", help="file with a line as localhost slots=4")
    ] = None,
    host_discovery_script: Annotated[
        str | None, typer.Option(help="elastic: program that prints localhost:SLOTS; asked once")
    ] = None,
    slots_per_host: Annotated[
        int | None, typer.Option(min=1, help="of a host that comes without a number [1]")
    ] = None,
    min_num_proc: Annotated[
        int | None,
        typer.Option("--min-np", "--min-num-proc", min=1, help="elastic: go on while so many are left"),
    ] = None,
    max_num_proc: Annotated[
        int | None, typer.Option("--max-np", "--max-num-proc", help="elastic: never more than -np")
    ] = None,
    reset_limit: Annotated[
        int | None, typer.Option(min=0, help="elastic: lost workers that are started anew [3]")
    ] = None,
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
    fusion_threshold_mb: Annotated[
        int | None, typer.Option(min=0, help="MiB of gradients that are exchanged together [4]")
    ] = None,
    start_timeout: Annotated[
        float, typer.Option(envvar="HOROVOD_START_TIMEOUT", help="seconds in which all must have started")
    ] = 300.0,
    verbose: Annotated[bool, typer.Option("--verbose", help="show the server's log")] = False,
    check_build: Annotated[
        bool, typer.Option("-cb", "--check-build", help="print what there is here, and end")
    ] = False,
    version: Annotated[
        bool, typer.Option("-v", "--version", help="print the version of Horovod's surface, and end")
    ] = False,
    gloo: Switch = None,
    mpi: Switch = None,
    jsrun: Switch = None,
    mpi_args: Value = None,
    mpi_threads_disable: Switch = None,
    tcp: Switch = None,
    binding_args: Value = None,
    gloo_timeout_seconds: Value = None,
    cycle_time_ms: Value = None,
    timeline_mark_cycles: Switch = None,
    disable_cache: Switch = None,
    cache_capacity: Value = None,
    network_interfaces: Value = None,
    network_interface: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
    ssh_port: Annotated[str | None, typer.Option("-p", "--ssh-port", hidden=True)] = None,
    ssh_identity_file: Annotated[str | None, typer.Option("-i", "--ssh-identity-file", hidden=True)] = None,
    hierarchical_allreduce: Switch = None,
    hierarchical_allgather: Switch = None,
    torus_allreduce: Switch = None,
    blacklist_cooldown_range: Annotated[tuple[int, int] | None, typer.Option(hidden=True)] = None,
    autotune: Switch = None,
    num_nccl_streams: Value = None,
    thread_affinity: Value = None,
    stall_check: Switch = None,
    stall_check_warning_time_seconds: Value = None,
    stall_check_shutdown_time_seconds: Value = None,
    elastic_timeout: Value = None,
    log_level: Value = None,
    log_with_timestamp: Switch = None,
    prefix_output_with_timestamp: Switch = None,
) -> None:
    """Start a server and workers on this machine, and run a script on them.

    The script may be written to workers, or to horovod.torch. Each line of its output is marked with
    its rank. When one worker fails, all are ended; the exit code is the first failure's.

    horovodrun's other flags are accepted, and a line says which of them change nothing here.
    """
    flags = dict(locals())
    if flags.pop("version"):
        print("0.28.1")
        raise SystemExit(0)
    raise SystemExit(_check_build() if flags.pop("check_build") else _run(flags))


def main() -> None:
    """Console entry of `ps-run`."""
    elsewhere = "other settings of server and workers come by the environment, as in PS_MODE=asp ps-run ..."
    terminal.run(app, "ps-run", elsewhere=elsewhere)


def _check_build() -> int:
    from hubring.workers.horovod.world.build import check_build

    print(check_build())
    return 0


def _run(flags: dict[str, object]) -> int:
    from hubring.ps.core.errors import HubringError, UsageError
    from hubring.workers.localrun.host import ELSEWHERE
    from hubring.workers.localrun.idle import IDLE, told
    from hubring.workers.localrun.job import LocalJob

    try:
        words = script(flags.pop("command"))
        if flags.pop("jsrun"):
            raise UsageError(f"--jsrun: {ELSEWHERE}")
        for line in told(name for name in IDLE if flags.pop(name) not in (None, [])):
            print(f"ps-run: {line}", file=sys.stderr)
        return LocalJob(**flags).run(words)  # type: ignore[arg-type]
    except HubringError as error:
        print(f"ps-run: {error}", file=sys.stderr)
        terminal.last_line({"error": str(error), "exit_code": error.exit_code})
        return error.exit_code


def script(words: object) -> list[str]:
    """Script and arguments of a command; `python` and `-u` before them change nothing.

    Raises:
        UsageError: There is no script, or no such file.
    """
    from hubring.ps.core.errors import UsageError

    left = list(words) if isinstance(words, list | tuple) else []
    if left and re.fullmatch(r"python(3(\.\d+)?)?", Path(left[0]).name):
        left = left[1:]
        left = left[1:] if left[:1] == ["-u"] else left
    if not left or left[0].startswith("-"):
        given = f"{left[0]!r} is none" if left else "there is none"
        raise UsageError(f"ps-run needs a script, and {given}: ps-run -np 2 train.py [ARGS]...")
    if not Path(left[0]).is_file():  # said now: each worker would, one by one, once the server runs
        raise UsageError(f"no script {left[0]}: name a file, as in ps-run -np 2 train.py [ARGS]...")
    return left


if __name__ == "__main__":
    main()

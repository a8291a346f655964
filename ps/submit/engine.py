"""The engines by name, their interface, and how `ps-server submit` sends a job to one."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any, NamedTuple

from hubring.ps.core.errors import EngineMissing
from hubring.ps.process.child import Child, passing_on
from hubring.ps.submit import containers, slurm
from hubring.ps.submit.job import Submission, assemble

PASSED_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Engine(NamedTuple):
    """How a job gets to one engine.

    Attributes:
        command: The program that reads the output of `render` on standard input, and its arguments.
        fix: What to do if the program is missing.
        render: Returns the job in the engine's format, without secrets. Raises ConfigError if the format
            cannot express a setting.
        secrets: Returns what the engine reads before the job, and a dry run leaves out. Nothing where the
            server makes the tokens.
    """

    command: tuple[str, ...]
    fix: str
    render: Callable[[Submission], str]
    secrets: Callable[[Submission], str] = lambda _: ""


ENGINES = {
    "slurm": Engine(
        ("sbatch",),
        "submit on a login node of the cluster, or run sbatch there with the output of --dry-run",
        slurm.render,
    ),
    "kubernetes": Engine(
        ("kubectl", "apply", "-f", "-"),  # in its current context and namespace
        "install it, or apply the output of --dry-run on a machine that has it",
        containers.render_kubernetes,
        containers.secrets,
    ),
    "compose": Engine(
        ("docker", "compose", "-f", "-", "up"),  # stays in the foreground until the job ends
        "install Docker with the compose plugin, or run the output of --dry-run on a machine that has it",
        containers.render_compose,
    ),
}


def send(engine: Engine, artefact: str) -> tuple[int, str]:
    """Runs the engine's program with a rendered job, and copies the program's output to stdout.

    Returns:
        The program's exit code, and the last line that it printed.

    Raises:
        EngineMissing: The program is not on the PATH.
    """
    name, *arguments = engine.command
    program = shutil.which(name)
    if program is None:
        raise EngineMissing(f"there is no {name} on the PATH; {engine.fix}")
    child = Child(name, [program, *arguments], stdin=PIPE, stdout=PIPE)
    with passing_on(PASSED_SIGNALS, child.signal):
        last_line = _feed(child, artefact)
        return child.exit_code(), last_line


def _feed(child: Child, artefact: str) -> str:
    """Writes the job, then copies the program's output; returns the last line that is not empty."""
    # A program that exits without reading explains that with its own output and exit code.
    with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
        pipe.write(artefact.encode())
    last_line = b""
    with child.stdout as lines:
        for line in lines:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            last_line = line.strip() or last_line
    return last_line.decode(errors="replace")


def submit(
    flags: Mapping[str, object], script: Sequence[str], config_file: Path | None, *, dry_run: bool
) -> dict[str, Any] | int:
    """Sends a job to its engine, or prints the engine's input.

    Args:
        flags: Values from the command line, by field name; None for flags that are not set.
        script: The script and its arguments; empty for a built-in job.
        config_file: TOML file.
        dry_run: Print the engine's input and nothing else, so that the engine's program can read it.

    Returns:
        The result for the last line; the exit code alone for a dry run.

    Raises:
        HubringError: The settings contradict each other, or the engine's program is missing.
    """
    job = assemble(flags, script, config_file)
    assert job.config.engine is not None
    engine = ENGINES[job.config.engine]
    artefact = engine.render(job)
    if dry_run:
        sys.stdout.write(artefact)
        return 0
    code, last_line = send(engine, engine.secrets(job) + artefact)
    command = " ".join(engine.command)
    result = {"engine": job.config.engine, "job": job.name, "command": command, "said": last_line}
    return {**result, "exit_code": code}

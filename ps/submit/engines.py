"""The engines by name, and `ps-server submit`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hubring.ps.submit.compose import Compose
from hubring.ps.submit.engine import Engine, send
from hubring.ps.submit.job import assemble
from hubring.ps.submit.kubernetes import Kubernetes
from hubring.ps.submit.slurm import Slurm

ENGINES: Mapping[str, Engine] = {"slurm": Slurm(), "kubernetes": Kubernetes(), "compose": Compose()}


def submit(
    flags: Mapping[str, object], script: Sequence[str], config_file: Path | None, *, dry_run: bool
) -> tuple[int, dict[str, Any] | None]:
    """Sends a job to its engine, or prints the engine's input.

    Args:
        flags: Values from the command line, by field name; None for flags that are not set.
        script: The script and its arguments; empty for a built-in job.
        config_file: TOML file.
        dry_run: Print the engine's input and nothing else, so that the engine's program can read it.

    Returns:
        The exit code, and the result for the last line; None for a dry run.

    Raises:
        HubringError: The settings contradict each other, or the engine's program is missing.
    """
    job = assemble(flags, script, config_file)
    assert job.config.engine is not None
    engine = ENGINES[job.config.engine]
    artefact = engine.render(job)
    if dry_run:
        sys.stdout.write(artefact)
        return 0, None
    answer = send(engine, engine.secrets(job) + artefact)
    command = " ".join(engine.command)
    result = {"engine": job.config.engine, "job": job.name, "command": command, "said": answer.last_line}
    return answer.code, {**result, "exit_code": answer.code}

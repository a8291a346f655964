"""The engines, by name, and what `ps-server submit` does with one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hubring.ps.submit.compose import Compose
from hubring.ps.submit.engine import Engine, hand_over
from hubring.ps.submit.job import assemble
from hubring.ps.submit.kubernetes import Kubernetes
from hubring.ps.submit.slurm import Slurm

ENGINES: Mapping[str, Engine] = {"slurm": Slurm(), "kubernetes": Kubernetes(), "compose": Compose()}


def submit(
    flags: Mapping[str, object], script: Sequence[str], config_file: Path | None, *, dry_run: bool
) -> tuple[int, dict[str, Any] | None]:
    """Hands a job to its engine, or prints what the engine would read.

    Args:
        flags: Field name to what the command line gave; None: nothing.
        script: The script and its arguments; empty: a job that ships.
        config_file: TOML file.
        dry_run: Print alone, and nothing else, so that the engine's program can read it.

    Returns:
        The exit code, and the result for the last line; None where what was printed is all.

    Raises:
        HubringError: The settings contradict each other, or the engine's program is not there.
    """
    job = assemble(flags, script, config_file)
    assert job.config.engine is not None
    engine = ENGINES[job.config.engine]
    artefact = engine.render(job)
    if dry_run:
        sys.stdout.write(artefact)
        return 0, None
    answer = hand_over(engine, artefact)
    command = " ".join(engine.command)
    result = {"engine": job.config.engine, "job": job.name, "command": command, "said": answer.said}
    return answer.code, {**result, "exit_code": answer.code}

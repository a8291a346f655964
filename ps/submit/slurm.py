"""SLURM: a batch script for `sbatch`.

The server runs in its own step, so that it outlives the script when SLURM stops the job. It writes its
address to a file in the job's folder, and its tokens to a folder there that only the job's user can read. The
workers run in a second step, where srun assigns the ranks. SLURM
sends the notice (`--signal`) to both steps directly.

User input enters the script in three ways, and none allows an injection: as flags and arguments, quoted by
`shlex`; in `#SBATCH` lines, checked against patterns in `hubring.ps.config.values`; and as the user's own
`#SBATCH` lines, which cannot contain a line break.
"""

from __future__ import annotations

import shlex
from importlib.resources import files

from jinja2 import StrictUndefined, Template

from hubring.ps.core.errors import Preempted
from hubring.ps.process.restarts import RESTARTABLE
from hubring.ps.submit.job import GRACE_SECONDS, Submission

ADDRESS_SECONDS = 120
"""How long the script waits for the server's address; Python can be slow to load from a network folder."""

_SCRIPT: Template = Template(
    files(__package__).joinpath("slurm.sh.jinja").read_text(),
    trim_blocks=True,
    keep_trailing_newline=True,
    undefined=StrictUndefined,
)
"""Parameters of the script are in `{{ }}`."""


def render(job: Submission) -> str:
    """Returns the batch script."""
    return _SCRIPT.render(
        directives="\n".join(_directives(job)),
        server=shlex.join(job.server_words),
        worker=shlex.join(job.worker_words),
        patience=ADDRESS_SECONDS,
        requeue=job.config.requeue,
        preempted=Preempted.exit_code,
        lost=" | ".join(map(str, sorted(RESTARTABLE))),
        restarts=job.restarts,
    )


def _directives(job: Submission) -> list[str]:
    config = job.config
    # Seconds between the notice and the time limit; for a short job, a quarter of its limit.
    notice = GRACE_SECONDS if job.seconds is None else max(1, min(GRACE_SECONDS, job.seconds // 4))
    given = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks": job.workers,
        "ntasks-per-node": job.per_node if job.nodes else None,
        "gpus-per-node": config.gpus or None,
        "cpus-per-task": config.cpus,
        "mem-per-cpu": f"{config.memory * 1024 // (config.cpus or 1)}M" if config.memory else None,
        "time": config.time,
        "partition": config.partition,
        "open-mode": "append",
        "signal": f"USR1@{notice}",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in given.items() if value is not None]
    requeue = ["#SBATCH --requeue"] if config.requeue or job.restarts else []
    return [*lines, *requeue, *config.engine_option]

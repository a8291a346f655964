"""What a container of a job gets, on Kubernetes and under Compose alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hubring.ps.core.errors import ConfigError
from hubring.ps.submit.job import PORT, Submission

EVERYWHERE = "0.0.0.0"  # noqa: S104 - in a network that is the job's own
USER = 10001
"""Whom the processes run as: nobody else's number, and not root's."""
CPUS = 2
MEMORY_GIB = 4
"""What a worker or server gets where nobody says."""


def cpus(job: Submission) -> int:
    """Cores of each worker."""
    return job.config.cpus or CPUS


def memory(job: Submission) -> int:
    """GiB of each worker, /dev/shm included: what lies there counts as its owner's memory."""
    return job.config.memory or MEMORY_GIB


def server_command(job: Submission) -> list[str]:
    """The server's program and its arguments."""
    return ["ps-server", "start", "--host", EVERYWHERE, "--port", str(PORT), *job.server_words]


def worker_command(job: Submission, server: str, more: Sequence[str] = ()) -> list[str]:
    """A container's program and its arguments; where it has several workers, `ps-worker` starts them.

    Args:
        job: The job.
        server: Under which name the container finds the server.
        more: Flags that the engine wants.
    """
    several = ["--nodes", str(job.nodes), "--gpus", str(job.per_node)] if job.per_node > 1 else []
    return ["ps-worker", "--server", f"{server}:{PORT}", *several, *more, *job.worker_words]


def page_port(job: Submission) -> int | None:
    """Port of the server's page and metrics; None where it has none, or one that nobody can know before."""
    given = job.server.page_port
    if job.server.no_page or given == 0:
        return None
    return PORT + 1 if given is None else given


def variables(job: Submission) -> dict[str, str]:
    """What a process cannot see for itself: it counts the host's cores, and takes its home for writable."""
    return {"OMP_NUM_THREADS": str(cpus(job)), "HOME": "/tmp", "PYTHONUNBUFFERED": "1"}  # noqa: S108


def absolute(path: Path) -> str:
    """A folder of checkpoints, as the place of a volume.

    Raises:
        ConfigError: It can be none.
    """
    if not path.is_absolute() or ":" in str(path):
        raise ConfigError(
            f"--checkpoint-dir {path}: a volume is mounted there, so it has to be an absolute path without"
            " colons, as in /checkpoints"
        )
    return str(path)


INSECURE = (
    "ps-server listens with --insecure, as workers are asked for no credentials yet: only the job's own",
    "containers may reach it.",
)
"""For the head of what is printed."""

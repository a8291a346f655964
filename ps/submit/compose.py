"""Docker Compose: a server and workers on one machine, in their own network.

The workers start when the server is healthy and reach it by its service's name. Server and workers start
themselves again after a loss, because Compose restarts for every exit code. The server makes the job's
tokens in a volume in memory, which only the job's containers mount. Compose passes no index to
a replica, so the hub assigns the ranks. With GPUs, one container runs all workers: `ps-worker` starts one
per GPU.
"""

from __future__ import annotations

from hubring.ps.submit import container
from hubring.ps.submit.job import Submission

_TOKENS_FOLDER = "/run/hubring"


def render(job: Submission) -> str:
    """Returns the Compose file."""
    # Compose stops all containers together, so the workers must stop after the same step.
    together = ["--on-preempt", "all"] if job.worker.on_preempt == "auto" else []
    restarts = ["--restarts", str(job.restarts)] if job.restarts else []
    return container.manifest(
        "compose.yaml.jinja",
        ["Made by: ps-server submit --engine compose"],
        job,
        server_command=container.server_command(job, restarts),
        worker_command=container.worker_command(job, "server", [*together, *restarts]),
        variables=container.variables(job, f"{_TOKENS_FOLDER}/tokens"),
        mount=_TOKENS_FOLDER,
    )

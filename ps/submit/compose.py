"""Docker Compose: a server and workers on one machine, in their own network.

The workers start when the server is healthy and reach it by its service's name. Server and workers start
themselves again after a loss, because Compose restarts for every exit code. The server makes the job's
tokens in a volume in memory, which only the job's containers mount. Compose passes no index to
a replica, so the hub assigns the ranks. With GPUs, one container runs all workers: `ps-worker` starts one
per GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hubring.ps.submit import container
from hubring.ps.submit.container import dump_yaml
from hubring.ps.submit.job import GRACE_SECONDS, PORT, Submission

SERVER = "server"
_CHECKPOINTS = "checkpoints"
_TOKENS = "tokens"
_TOKENS_FOLDER = "/run/hubring"
_IN_MEMORY = {
    "driver_opts": {
        "type": "tmpfs",
        "device": "tmpfs",
        "o": f"uid={container.USER},gid={container.USER},mode=0700,size=1m",
    }
}
"""A volume that the engine forgets when its last container stops."""

Service = dict[str, Any]


def render(job: Submission) -> str:
    """Returns the Compose file."""
    saved: Service = {_CHECKPOINTS: {}} if job.servers_folders or job.workers_folders else {}
    document = {
        "name": job.name,
        "services": {SERVER: _server(job), "worker": _workers(job)},
        "networks": {"job": {}},
        "volumes": {_TOKENS: _IN_MEMORY, **saved},
    }
    return dump_yaml(["Made by: ps-server submit --engine compose"], [_literal(document)])


def _server(job: Submission) -> Service:
    page = job.server.status_port
    # Publish the page on a free loopback port; `docker compose -p NAME port server PORT` prints it.
    seen = {"ports": [f"127.0.0.1::{page}"]} if page else {}
    return {
        "entrypoint": [*container.server_command(job), *_restarts(job)],
        **_service(job, 1, _mount(_TOKENS, _TOKENS_FOLDER), job.servers_folders),
        **seen,
        "healthcheck": {
            "test": ["CMD", "ps-server", "health", f"127.0.0.1:{PORT}"],
            "interval": "2s",
            "timeout": "10s",
            "retries": 30,
        },
        "deploy": {"resources": {"limits": _limits(job, 1)}},
    }


def _workers(job: Submission) -> Service:
    several = job.per_node > 1
    resources: Service = {"limits": _limits(job, job.per_node)}
    if job.config.gpus:
        devices = {"driver": "nvidia", "count": job.config.gpus, "capabilities": ["gpu"]}
        resources["reservations"] = {"devices": [devices]}
    # Compose stops all containers together, so the workers must stop after the same step.
    together = ["--on-preempt", "all"] if job.worker.on_preempt == "auto" else []
    return {
        "entrypoint": container.worker_command(job, SERVER, [*together, *_restarts(job)]),
        **_service(
            job, job.per_node, {**_mount(_TOKENS, _TOKENS_FOLDER), "read_only": True}, job.workers_folders
        ),
        "depends_on": {SERVER: {"condition": "service_healthy"}},
        "deploy": {"replicas": 1 if several else job.workers, "resources": resources},
    }


def _service(job: Submission, processes: int, tokens: Service, folders: Sequence[Path]) -> Service:
    """Returns the keys of both services: no root user, no capabilities, a read-only root file system.

    Args:
        job: The job.
        processes: How many processes the service has.
        tokens: The mount of the job's tokens.
        folders: Where to mount the volume for checkpoints.
    """
    return {
        "image": job.config.image,
        "command": [],
        "init": True,
        "user": f"{container.USER}:{container.USER}",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "environment": container.variables(job, f"{_TOKENS_FOLDER}/tokens"),
        "networks": ["job"],
        "tmpfs": ["/tmp"],  # noqa: S108
        "shm_size": f"{processes * container.memory(job) * 512}m",
        "stop_grace_period": f"{GRACE_SECONDS}s",
        "volumes": [
            tokens,
            *(_mount(_CHECKPOINTS, container.absolute(path)) for path in folders),
        ],
    }


def _restarts(job: Submission) -> list[str]:
    return ["--restarts", str(job.restarts)] if job.restarts else []


def _limits(job: Submission, processes: int) -> Service:
    cpus, gib = processes * container.cpus(job), processes * container.memory(job)
    return {"cpus": str(cpus), "memory": f"{gib}g", "pids": 1024 * processes}


def _mount(volume: str, target: str) -> Service:
    return {"type": "volume", "source": volume, "target": target}


def _literal(value: Any) -> Any:
    """Escapes `$` as `$$`, because Compose replaces `$NAME` with a variable in every value."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, dict):
        return {key: _literal(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_literal(each) for each in value]
    return value

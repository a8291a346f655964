"""The pods of a job on Kubernetes: one for the server, and those of the workers.

They meet the Pod Security Standard `restricted`: no root user, no capabilities, a read-only root file
system, no token for the cluster's API.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hubring.ps.submit import container, secret
from hubring.ps.submit.job import GRACE_SECONDS, PORT, Submission

CHECKPOINTS = "checkpoints"

Pod = dict[str, Any]


def labels(job: Submission) -> dict[str, str]:
    """Returns the labels that identify this job's objects."""
    return {"app.kubernetes.io/name": "hubring", "app.kubernetes.io/instance": job.name}


def server(job: Submission) -> Pod:
    """Returns the server's pod: ready when workers can join, killed when it no longer answers."""
    page = container.page_port(job)
    ports = [{"name": "control", "containerPort": PORT, "protocol": "TCP"}]
    ports += [] if page is None else [{"name": "page", "containerPort": page, "protocol": "TCP"}]
    inside = {
        "name": "server",
        "image": job.config.image,
        "command": _unexpanded(container.server_command(job)),
        "ports": ports,
        # A pod that has started is ready, so that one probe runs on. Kubernetes' gRPC probes cannot use TLS.
        "startupProbe": {**_probe("--service", "ready"), "periodSeconds": 5, "failureThreshold": 60},
        "livenessProbe": {**_probe(), "periodSeconds": 20, "failureThreshold": 3},
    }
    tokens = secret.volume(job, secret.TOKENS, secret.KEY)
    return _pod(job, inside, 1, tokens, [job.servers_folder] if job.servers_folder else [])


def worker(job: Submission, server_name: str, name: str) -> Pod:
    """Returns a pod of workers. It needs no probe: the server detects lost workers by their leases.

    Args:
        job: The job.
        server_name: The server's host name.
        name: The container's name.
    """
    # If one pod is evicted, only its workers stop; the job continues, and they rejoin later.
    alone = job.per_node > 1 and not job.all_or_nothing and job.worker.on_preempt == "auto"
    more = ["--on-preempt", "leave"] if alone else []
    inside = {
        "name": name,
        "image": job.config.image,
        "command": _unexpanded(container.worker_command(job, server_name, more)),
    }
    tokens = secret.volume(job, secret.WORKER)
    return _pod(job, inside, job.per_node, tokens, job.workers_folders, gpus=job.config.gpus)


def _probe(*words: str) -> Pod:
    command = ["ps-server", "health", f"127.0.0.1:{PORT}", *words]
    return {"exec": {"command": command}, "timeoutSeconds": 10}


def _pod(
    job: Submission, inside: Pod, processes: int, tokens: Pod, folders: Sequence[Path], gpus: int = 0
) -> Pod:
    gib = processes * container.memory(job)
    resources = {"cpu": str(processes * container.cpus(job)), "memory": f"{gib}Gi"}
    variables = container.variables(job, secret.FILE)
    resources |= {"nvidia.com/gpu": str(gpus)} if gpus else {}
    mounts = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    mounts.append(secret.mount())
    mounts += [{"name": CHECKPOINTS, "mountPath": container.absolute(path)} for path in folders]
    volumes: list[Pod] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{gib * 512}Mi"}},
        tokens,
    ]
    if folders:
        claim = {"claimName": f"{job.name}-{CHECKPOINTS}"}
        volumes.append({"name": CHECKPOINTS, "persistentVolumeClaim": claim})
    return {
        "metadata": {"labels": labels(job)},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": container.USER,
                "runAsGroup": container.USER,
                "fsGroup": container.USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    **inside,
                    "env": [{"name": key, "value": text} for key, text in variables.items()],
                    "resources": {"limits": resources, "requests": dict(resources)},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "volumeMounts": mounts,
                }
            ],
            "volumes": volumes,
        },
    }


def _unexpanded(words: Sequence[str]) -> list[str]:
    """Escapes `$` as `$$`, because Kubernetes replaces `$(NAME)` with a variable in a command."""
    return [word.replace("$", "$$") for word in words]

"""Pods of a job on Kubernetes: the server's, and the workers'.

They meet the Pod Security Standard `restricted`: not root, no capability, a root
file system that nobody writes to, no token for the cluster's API.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hubring.ps.submit import container
from hubring.ps.submit.job import GRACE_SECONDS, PORT, Submission

CHECKPOINTS = "checkpoints"

Pod = dict[str, Any]


def labels(job: Submission) -> dict[str, str]:
    """What tells this job's objects from others'."""
    return {"app.kubernetes.io/name": "hubring", "app.kubernetes.io/instance": job.name}


def server(job: Submission) -> Pod:
    """The server's pod: ready once workers may come, and ended where it answers nobody any more."""
    page = container.page_port(job)
    ports = [{"name": "control", "containerPort": PORT, "protocol": "TCP"}]
    ports += [] if page is None else [{"name": "page", "containerPort": page, "protocol": "TCP"}]
    inside = {
        "name": "server",
        "image": job.config.image,
        "command": _unexpanded(container.server_command(job)),
        "ports": ports,
        "startupProbe": {"grpc": {"port": PORT, "service": ""}, "periodSeconds": 2, "failureThreshold": 60},
        "readinessProbe": {"grpc": {"port": PORT, "service": "ready"}, "periodSeconds": 2},
        "livenessProbe": {
            "grpc": {"port": PORT, "service": ""},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
    }
    return _pod(job, inside, 1, [job.servers_folder] if job.servers_folder else [])


def worker(job: Submission, server_name: str, name: str) -> Pod:
    """A pod of workers. It needs no probe: the server sees by its lease who is gone.

    Args:
        job: The job.
        server_name: Under which name the server is found.
        name: The container's.
    """
    # One pod that is taken away is no end for the others: its workers come again.
    alone = job.per_node > 1 and not job.stands_together and job.worker.on_preempt == "auto"
    more = ["--on-preempt", "leave"] if alone else []
    inside = {
        "name": name,
        "image": job.config.image,
        "command": _unexpanded(container.worker_command(job, server_name, more)),
    }
    return _pod(job, inside, job.per_node, job.workers_folders, gpus=job.config.gpus)


def _pod(job: Submission, inside: Pod, processes: int, folders: Sequence[Path], gpus: int = 0) -> Pod:
    gib = processes * container.memory(job)
    resources = {"cpu": str(processes * container.cpus(job)), "memory": f"{gib}Gi"}
    resources |= {"nvidia.com/gpu": str(gpus)} if gpus else {}
    mounts = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    mounts += [{"name": CHECKPOINTS, "mountPath": container.absolute(path)} for path in folders]
    volumes: list[Pod] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{gib * 512}Mi"}},
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
                    "env": [{"name": key, "value": text} for key, text in container.variables(job).items()],
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
    """Kubernetes puts variables for `$(NAME)` in a command, and `$` for `$$`."""
    return [word.replace("$", "$$") for word in words]

"""The pods of a job on Kubernetes, for its server and its workers, and the Secret with its tokens.

The pods meet the Pod Security Standard `restricted`: no root user, no capabilities, a read-only root file
system, no token for the cluster's API.

The server mounts all of the Secret, the workers only their token. A dry run prints no Secret, so that its
output can be kept and shared. `secret_instructions` explains how to make one by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hubring.ps.security import token_file as files
from hubring.ps.security.guard import Role
from hubring.ps.security.keyring import make_files
from hubring.ps.submit import container
from hubring.ps.submit.job import GRACE_SECONDS, PORT, Submission

TOKENS_ENTRY, KEY_ENTRY, WORKER_ENTRY = "tokens", "tokens.key", "worker"
"""Entries of the Secret: all tokens, the certificate with its private key, and the workers' token."""
MOUNT_FOLDER = "/run/secrets/hubring"
TOKENS_FILE = f"{MOUNT_FOLDER}/{TOKENS_ENTRY}"


def secret_name(job: Submission) -> str:
    """Returns the Secret's name."""
    return f"{job.name}-{TOKENS_ENTRY}"


def secret_instructions(job: Submission) -> tuple[str, ...]:
    """Returns comment lines that explain how to make the Secret by hand."""
    return (
        f"Without `ps-server submit`, first make the job's tokens, the Secret {secret_name(job)}:",
        f"  ps-server token new {TOKENS_ENTRY}",
        f"  ps-server token show --token-file {TOKENS_ENTRY} --role {Role.WORKER} --output {WORKER_ENTRY}",
        f"  kubectl create secret generic {secret_name(job)} --from-file={TOKENS_ENTRY}"
        f" --from-file={KEY_ENTRY} --from-file={WORKER_ENTRY}",
        f"  rm {TOKENS_ENTRY} {KEY_ENTRY} {WORKER_ENTRY}",
    )


def new_secret(job: Submission, metadata: Any) -> dict[str, Any]:
    """Returns a Secret with new tokens. It cannot change, because a running job uses it.

    Args:
        job: The job.
        metadata: Name and labels of the Secret.
    """
    with TemporaryDirectory(prefix="hubring-tokens-") as folder:
        file = make_files(Path(folder) / TOKENS_ENTRY)
        entries = {
            TOKENS_ENTRY: file.read_text(),
            KEY_ENTRY: file.with_name(KEY_ENTRY).read_text(),
            WORKER_ENTRY: f"{files.read_tokens(file)[Role.WORKER]}\n",
        }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "immutable": True,
        "stringData": entries,
    }


def secret_volume(job: Submission, *entries: str) -> dict[str, Any]:
    """Returns the volume of a pod that sees these entries of the Secret.

    Args:
        job: The job.
        *entries: Names of entries. The workers' token gets the name of the file with all tokens.
    """
    items = [{"key": entry, "path": TOKENS_ENTRY if entry == WORKER_ENTRY else entry} for entry in entries]
    # The kubelet adds the right to read for the pod's group.
    return {
        "name": TOKENS_ENTRY,
        "secret": {"secretName": secret_name(job), "defaultMode": 0o400, "items": items},
    }


def secret_mount() -> dict[str, Any]:
    """Returns the mount of that volume in a container."""
    return {"name": TOKENS_ENTRY, "mountPath": MOUNT_FOLDER, "readOnly": True}


CHECKPOINTS = "checkpoints"

Pod = dict[str, Any]


def job_labels(job: Submission) -> dict[str, str]:
    """Returns the labels that identify this job's objects."""
    return {"app.kubernetes.io/name": "hubring", "app.kubernetes.io/instance": job.name}


def server_pod(job: Submission) -> Pod:
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
    tokens = secret_volume(job, TOKENS_ENTRY, KEY_ENTRY)
    return _pod(job, inside, 1, tokens, [job.servers_folder] if job.servers_folder else [])


def worker_pod(job: Submission, server_name: str, name: str) -> Pod:
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
    tokens = secret_volume(job, WORKER_ENTRY)
    return _pod(job, inside, job.per_node, tokens, job.workers_folders, gpus=job.config.gpus)


def _probe(*words: str) -> Pod:
    command = ["ps-server", "health", f"127.0.0.1:{PORT}", *words]
    return {"exec": {"command": command}, "timeoutSeconds": 10}


def _pod(
    job: Submission, inside: Pod, processes: int, tokens: Pod, folders: Sequence[Path], gpus: int = 0
) -> Pod:
    gib = processes * container.memory(job)
    resources = {"cpu": str(processes * container.cpus(job)), "memory": f"{gib}Gi"}
    variables = container.variables(job, TOKENS_FILE)
    resources |= {"nvidia.com/gpu": str(gpus)} if gpus else {}
    mounts = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    mounts.append(secret_mount())
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
        "metadata": {"labels": job_labels(job)},
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

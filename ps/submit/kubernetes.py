"""Kubernetes: a JobSet, or a Kubeflow TrainJob with its runtime; tokens; a network policy; a volume claim.

A JobSet has one Job for the server and one for the workers, which start, end and restart together. The
workers reach the server by the host name that JobSet gives its pod. The workers are pods of an Indexed
Job. Their JOB_COMPLETION_INDEX is their rank, or their node's index if a pod runs several workers.

Exit codes decide how the job ends. The server's exit code is the job's. 75 means "stopped on request", 69
"lost a process", 128 and more "killed":

If a hub's worker exits with 69 or 75, or its pod is evicted, Kubernetes replaces the pod, and the worker
rejoins.

If the server is lost or evicted, or any worker is in an all-or-nothing job, the attempt ends, and JobSet
restarts the job from its checkpoint: at most --restarts times, or with --requeue any number of times.
JobSet cannot count losses and preemptions apart: it sees only that a pod failure rule failed a Job.

Other exit codes do not restart the job.

The pods meet the Pod Security Standard `restricted`: no root user, no capabilities, a read-only root file
system, no token for the cluster's API.

The server mounts all of the Secret, the workers only their token. A dry run prints no Secret, so that its
output can be kept and shared. `secret_instructions` explains how to make one by hand.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hubring.ps.core.errors import Fenced, ServerUnreachable, UsageError
from hubring.ps.process.restarts import RESTARTABLE
from hubring.ps.security import token_file as files
from hubring.ps.security.guard import Role
from hubring.ps.security.keyring import make_files
from hubring.ps.submit import container
from hubring.ps.submit.job import Submission

RESTARTED = sorted(RESTARTABLE)
HOPELESS = [UsageError.exit_code]
"""Exit codes after which a replacement of the worker would fail the same way.

78 is not among them: it can also mean that the lease of the worker's predecessor has not expired yet.
"""
REPLACED = [ServerUnreachable.exit_code, Fenced.exit_code]
"""Exit codes of a hub's worker whose replacements are not counted: it lost its server or its place."""
REPLACEMENTS = 3
"""How many failed workers of a hub are replaced in total."""

TOKENS_ENTRY, KEY_ENTRY, WORKER_ENTRY = "tokens", "tokens.key", "worker"
"""Entries of the Secret: all tokens, the certificate with its private key, and the workers' token."""
MOUNT_FOLDER = "/run/secrets/hubring"
TOKENS_FILE = f"{MOUNT_FOLDER}/{TOKENS_ENTRY}"

_COMMENT = {
    "jobset": "Made by: ps-server submit --engine kubernetes. Needs JobSet 0.8 or later in the cluster.",
    "trainjob": "Made by: ps-server submit --engine kubernetes --kind trainjob. Needs Kubeflow Trainer 2.",
}


def render(job: Submission) -> str:
    """Returns the manifests, in the order in which Kubernetes needs them, without the Secret."""
    # If one pod is evicted, only its workers stop; the job continues, and they rejoin later.
    alone = job.per_node > 1 and not job.all_or_nothing and job.worker.on_preempt == "auto"
    # The server's host name: JobSet, Job, the Job's index, the pod's index, and the service.
    server = f"{job.name}-server-0-0.{job.name}"
    return container.manifest(
        "kubernetes.yaml.jinja",
        [_COMMENT[job.config.kind], *secret_instructions(job)],
        job,
        server_command=container.server_command(job),
        worker_command=container.worker_command(job, server, ["--on-preempt", "leave"] if alone else []),
        variables=container.variables(job, TOKENS_FILE),
        mount=MOUNT_FOLDER,
        secret=secret_name(job),
        restarted=RESTARTED,
        hopeless=HOPELESS,
        replaced=REPLACED,
        replacements=REPLACEMENTS,
    )


def secrets(job: Submission) -> str:
    """Returns the Secret with the job's tokens, and a separator."""
    return container.dump_yaml([], [new_secret(job)]) + "---\n"


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


def new_secret(job: Submission) -> dict[str, Any]:
    """Returns a Secret with new tokens. It cannot change, because a running job uses it."""
    with TemporaryDirectory(prefix="hubring-tokens-") as folder:
        file = make_files(Path(folder) / TOKENS_ENTRY)
        entries = {
            TOKENS_ENTRY: file.read_text(),
            KEY_ENTRY: file.with_name(KEY_ENTRY).read_text(),
            WORKER_ENTRY: f"{files.read_tokens(file)[Role.WORKER]}\n",
        }
    labels = {"app.kubernetes.io/name": "hubring", "app.kubernetes.io/instance": job.name}
    metadata = {"name": secret_name(job), "labels": labels}
    kind = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "immutable": True}
    return {**kind, "stringData": entries}

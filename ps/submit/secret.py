"""The Secret on Kubernetes with a job's tokens: the server mounts all of it, the workers only their token.

A dry run prints no Secret, so that its output can be kept and shared. `how_to` explains how to make one by
hand.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hubring.ps.security import token_file as files
from hubring.ps.security.keyring import make_files
from hubring.ps.security.policy import Role
from hubring.ps.submit.job import Submission

TOKENS, KEY, WORKER = "tokens", "tokens.key", "worker"
"""Entries of the Secret: all tokens, the certificate with its private key, and the workers' token."""
FOLDER = "/run/secrets/hubring"
FILE = f"{FOLDER}/{TOKENS}"


def name(job: Submission) -> str:
    """Returns the Secret's name."""
    return f"{job.name}-{TOKENS}"


def how_to(job: Submission) -> tuple[str, ...]:
    """Returns comment lines that explain how to make the Secret by hand."""
    return (
        f"Without `ps-server submit`, first make the job's tokens, the Secret {name(job)}:",
        f"  ps-server token new {TOKENS}",
        f"  ps-server token show --token-file {TOKENS} --role {Role.WORKER} --output {WORKER}",
        f"  kubectl create secret generic {name(job)} --from-file={TOKENS} --from-file={KEY}"
        f" --from-file={WORKER}",
        f"  rm {TOKENS} {KEY} {WORKER}",
    )


def new(job: Submission, metadata: Any) -> dict[str, Any]:
    """Returns a Secret with new tokens. It cannot change, because a running job uses it.

    Args:
        job: The job.
        metadata: Name and labels of the Secret.
    """
    with TemporaryDirectory(prefix="hubring-tokens-") as folder:
        file = make_files(Path(folder) / TOKENS)
        entries = {
            TOKENS: file.read_text(),
            KEY: file.with_name(KEY).read_text(),
            WORKER: f"{files.read(file)[Role.WORKER]}\n",
        }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "immutable": True,
        "stringData": entries,
    }


def volume(job: Submission, *entries: str) -> dict[str, Any]:
    """Returns the volume of a pod that sees these entries of the Secret.

    Args:
        job: The job.
        *entries: Names of entries. The workers' token gets the name of the file with all tokens.
    """
    items = [{"key": entry, "path": TOKENS if entry == WORKER else entry} for entry in entries]
    # The kubelet adds the right to read for the pod's group.
    return {"name": TOKENS, "secret": {"secretName": name(job), "defaultMode": 0o400, "items": items}}


def mount() -> dict[str, Any]:
    """Returns the mount of that volume in a container."""
    return {"name": TOKENS, "mountPath": FOLDER, "readOnly": True}

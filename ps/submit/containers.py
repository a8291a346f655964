"""Jobs in containers, on Kubernetes or with Docker Compose. The manifests are templates in YAML.

Kubernetes gets a JobSet, or a Kubeflow TrainJob with its runtime; tokens; a network policy; a volume claim.
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

Docker Compose gets a server and workers on one machine, in their own network.
The workers start when the server is healthy and reach it by its service's name. Server and workers start
themselves again after a loss, because Compose restarts for every exit code. The server makes the job's
tokens in a volume in memory, which only the job's containers mount. Compose passes no index to
a replica, so the hub assigns the ranks. With GPUs, one container runs all workers: `ps-worker` starts one
per GPU.

PyYAML writes the strings `1e3`, `0o17` and `y` without quotes; Kubernetes and Compose, with other YAML
versions, can read them as numbers or as true. So every value that is a string is quoted.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from hubring.ps.core.errors import ConfigError, Fenced, ServerUnreachable, UsageError
from hubring.ps.process.restarts import RESTARTABLE
from hubring.ps.security import token_file
from hubring.ps.security.guard import Role
from hubring.ps.security.keyring import make_files
from hubring.ps.submit.job import GRACE_SECONDS, PORT, Submission

USER = 10001
"""The user id of the processes: not root, and not used by another user."""

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

_TOKENS_FOLDER = "/run/hubring"


def render_kubernetes(job: Submission) -> str:
    """Returns the manifests, in the order in which Kubernetes needs them, without the Secret."""
    # If one pod is evicted, only its workers stop; the job continues, and they rejoin later.
    alone = job.per_node > 1 and not job.all_or_nothing and job.worker.on_preempt == "auto"
    # The server's host name: JobSet, Job, the Job's index, the pod's index, and the service.
    server = f"{job.name}-server-0-0.{job.name}"
    return _manifest(
        "kubernetes.yaml.jinja",
        [_COMMENT[job.config.kind], *secret_instructions(job)],
        job,
        server_command=_server_command(job),
        worker_command=_worker_command(job, server, ["--on-preempt", "leave"] if alone else []),
        variables=_variables(job, TOKENS_FILE),
        mount=MOUNT_FOLDER,
        secret=secret_name(job),
        restarted=RESTARTED,
        hopeless=HOPELESS,
        replaced=REPLACED,
        replacements=REPLACEMENTS,
    )


def secrets(job: Submission) -> str:
    """Returns the Secret with the job's tokens, and a separator."""
    return _yaml([], [new_secret(job)]) + "---\n"


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
            WORKER_ENTRY: f"{token_file.read_tokens(file)[Role.WORKER]}\n",
        }
    labels = {"app.kubernetes.io/name": "hubring", "app.kubernetes.io/instance": job.name}
    metadata = {"name": secret_name(job), "labels": labels}
    kind = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "immutable": True}
    return {**kind, "stringData": entries}


def render_compose(job: Submission) -> str:
    """Returns the Compose file."""
    # Compose stops all containers together, so the workers must stop after the same step.
    together = ["--on-preempt", "all"] if job.worker.on_preempt == "auto" else []
    restarts = ["--restarts", str(job.restarts)] if job.restarts else []
    return _manifest(
        "compose.yaml.jinja",
        ["Made by: ps-server submit --engine compose"],
        job,
        server_command=_server_command(job, restarts),
        worker_command=_worker_command(job, "server", [*together, *restarts]),
        variables=_variables(job, f"{_TOKENS_FOLDER}/tokens"),
        mount=_TOKENS_FOLDER,
    )


def _manifest(template: str, comment: Sequence[str], job: Submission, **values: object) -> str:
    """Returns the documents of a template of this package, after the comment lines.

    Each value is quoted, so it cannot become syntax.
    """
    text = files(__package__).joinpath(template).read_text()
    shared = {"job": job, "user": USER, "port": PORT, "grace": GRACE_SECONDS}
    return _yaml(comment, [*yaml.safe_load_all(_TEMPLATES.from_string(text).render(shared | values))])


def _yaml(comment: Sequence[str], documents: Sequence[Mapping[str, Any]]) -> str:
    """Returns the documents as text, after the comment lines."""
    head = "".join(f"# {line}\n" for line in comment)
    return head + _dumped(documents, default_flow_style=False)


def _dumped(documents: Sequence[Any], **style: Any) -> str:
    text: str = yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize, **style
    )
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes strings except keys, and writes no YAML aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        node = super().represent_mapping(tag, mapping, flow_style)
        for key, _ in node.value:
            key.style = None
        return node


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')


_Dumper.add_representer(str, _quoted)


def _as_yaml(value: Any) -> Markup:
    """Returns a value on one line; the text that a macro made as it is."""
    if isinstance(value, Markup):
        return value
    return Markup(_dumped([value], default_flow_style=True).partition("\n")[0])  # noqa: S704 - it is YAML


def _absolute(path: Path) -> str:
    """Returns a checkpoint folder as the mount point of a volume.

    Raises:
        ConfigError: The path is relative or contains a colon.
    """
    if not path.is_absolute() or ":" in str(path):
        raise ConfigError(
            f"--checkpoint-dir {path}: expected an absolute path without colons, such as /checkpoints,"
            " because a volume is mounted there"
        )
    return str(path)


_TEMPLATES = Environment(autoescape=True, undefined=StrictUndefined, finalize=_as_yaml, trim_blocks=True)
_TEMPLATES.filters["absolute"] = _absolute


def _server_command(job: Submission, more: Sequence[str] = ()) -> list[str]:
    """Returns the server's command line, with further flags that the engine adds."""
    host = "0.0.0.0"  # noqa: S104 - the job has its own network
    return _unexpanded(["ps-server", "start", "--host", host, "--port", str(PORT), *job.server_words, *more])


def _worker_command(job: Submission, server: str, more: Sequence[str] = ()) -> list[str]:
    """Returns the command line of a container of workers. `ps-worker` starts them if there are several.

    Args:
        job: The job.
        server: The server's host name.
        more: Flags that the engine adds.
    """
    several = ["--nodes", str(job.nodes), "--gpus", str(job.per_node)] if job.per_node > 1 else []
    if several and not job.config.gpus and job.worker.accelerator == "auto":
        several += ["--accelerator", "cpu"]
    words = ["ps-worker", "--server", f"{server}:{PORT}", *several, *more, *job.worker_words]
    return _unexpanded(words)


def _variables(job: Submission, tokens: str) -> dict[str, str]:
    """Returns variables for settings that a process in a container cannot detect.

    A process counts all cores of the host, and expects a writable home folder. Programs that a user runs in a
    container, such as `ps-server status`, find the tokens too.

    Args:
        job: The job.
        tokens: The file with the tokens.
    """
    return {
        "OMP_NUM_THREADS": str(job.cpus),
        "HOME": "/tmp",  # noqa: S108
        "PYTHONUNBUFFERED": "1",
        "PS_TOKEN_FILE": tokens,
    }


def _unexpanded(words: Sequence[str]) -> list[str]:
    """Escapes `$` as `$$`: Kubernetes replaces `$(NAME)` with a variable in a command, Compose `$NAME`."""
    return [word.replace("$", "$$") for word in words]

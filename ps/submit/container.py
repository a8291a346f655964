"""What containers have in common on Kubernetes and Compose, and the YAML that both read alike.

PyYAML writes the strings `1e3`, `0o17` and `y` without quotes; Kubernetes and Compose, with other YAML
versions, can read them as numbers or as true. So every value that is a string is quoted.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hubring.ps.core.errors import ConfigError
from hubring.ps.submit.job import PORT, Submission


def dump_yaml(comment: Sequence[str], documents: Sequence[Mapping[str, Any]]) -> str:
    """Returns the documents as text, after the comment lines."""
    head = "".join(f"# {line}\n" for line in comment)
    body = yaml.dump_all(
        documents,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=sys.maxsize,
        default_flow_style=False,
    )
    return head + body


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


EVERYWHERE = "0.0.0.0"  # noqa: S104 - the job has its own network
USER = 10001
"""The user id of the processes: not root, and not used by another user."""
CPUS = 2
MEMORY_GIB = 4
"""Defaults for a worker or a server without --cpus and --memory."""


def cpus(job: Submission) -> int:
    """Returns the cores per worker."""
    return job.config.cpus or CPUS


def memory(job: Submission) -> int:
    """Returns the GiB per worker. This includes /dev/shm, which counts as memory of its container."""
    return job.config.memory or MEMORY_GIB


def server_command(job: Submission) -> list[str]:
    """Returns the server's command line."""
    return ["ps-server", "start", "--host", EVERYWHERE, "--port", str(PORT), *job.server_words]


def worker_command(job: Submission, server: str, more: Sequence[str] = ()) -> list[str]:
    """Returns the command line of a container of workers. `ps-worker` starts them if there are several.

    Args:
        job: The job.
        server: The server's host name.
        more: Flags that the engine adds.
    """
    several = ["--nodes", str(job.nodes), "--gpus", str(job.per_node)] if job.per_node > 1 else []
    if several and not job.config.gpus and job.worker.accelerator == "auto":
        several += ["--accelerator", "cpu"]
    return ["ps-worker", "--server", f"{server}:{PORT}", *several, *more, *job.worker_words]


def page_port(job: Submission) -> int | None:
    """Returns the port of the server's page and metrics; None if there is no page, or its port is 0."""
    given = job.server.page_port
    if job.server.no_page or given == 0:
        return None
    return PORT + 1 if given is None else given


def variables(job: Submission, tokens: str) -> dict[str, str]:
    """Returns variables for settings that a process in a container cannot detect.

    A process counts all cores of the host, and expects a writable home folder. Programs that a user runs in a
    container, such as `ps-server status`, find the tokens too.

    Args:
        job: The job.
        tokens: The file with the tokens.
    """
    return {
        "OMP_NUM_THREADS": str(cpus(job)),
        "HOME": "/tmp",  # noqa: S108
        "PYTHONUNBUFFERED": "1",
        "PS_TOKEN_FILE": tokens,
    }


def absolute(path: Path) -> str:
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

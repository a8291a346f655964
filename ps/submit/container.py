"""What containers have in common on Kubernetes and Compose, and the YAML that both read alike.

PyYAML writes the strings `1e3`, `0o17` and `y` without quotes; Kubernetes and Compose, with other YAML
versions, can read them as numbers or as true. So every value that is a string is quoted.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from hubring.ps.core.errors import ConfigError
from hubring.ps.submit.job import GRACE_SECONDS, PORT, Submission

USER = 10001
"""The user id of the processes: not root, and not used by another user."""


def manifest(template: str, comment: Sequence[str], job: Submission, **values: object) -> str:
    """Returns the documents of a template of this package, after the comment lines.

    Each value is quoted, so it cannot become syntax.
    """
    text = files(__package__).joinpath(template).read_text()
    shared = {"job": job, "user": USER, "port": PORT, "grace": GRACE_SECONDS}
    return dump_yaml(comment, [*yaml.safe_load_all(_TEMPLATES.from_string(text).render(shared | values))])


def dump_yaml(comment: Sequence[str], documents: Sequence[Mapping[str, Any]]) -> str:
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


_TEMPLATES = Environment(autoescape=True, undefined=StrictUndefined, finalize=_as_yaml, trim_blocks=True)
_TEMPLATES.filters["absolute"] = absolute


def server_command(job: Submission, more: Sequence[str] = ()) -> list[str]:
    """Returns the server's command line, with further flags that the engine adds."""
    host = "0.0.0.0"  # noqa: S104 - the job has its own network
    return _unexpanded(["ps-server", "start", "--host", host, "--port", str(PORT), *job.server_words, *more])


def worker_command(job: Submission, server: str, more: Sequence[str] = ()) -> list[str]:
    """Returns the command line of a container of workers. `ps-worker` starts them if there are several.

    Args:
        job: The job.
        server: The server's host name.
        more: Flags that the engine adds.
    """
    several = ["--nodes", str(job.nodes), "--gpus", str(job.per_node)] if job.per_node > 1 else []
    words = ["ps-worker", "--server", f"{server}:{PORT}", *several, *more, *job.worker_words]
    return _unexpanded(words)


def variables(job: Submission, tokens: str) -> dict[str, str]:
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

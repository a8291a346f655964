"""Jobs for `ps-server submit`, and the manifests that it prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hubring.ps import cli
from hubring.ps.config import terminal
from hubring.ps.submit.engine import ENGINES
from hubring.ps.submit.job import Submission, assemble

IMAGE = "registry.example/hubring:1"

NASTY = [
    *("", " ", "two words", "it's", '"quoted"', "$HOME", "$(touch injected)", "`touch injected`"),
    *("; touch injected", "a\nb\n#SBATCH --nodes=9\n", "\\", "\\'; touch injected; '", "*", "~", "!!"),
    *("--", "-x", "ü", "{server}", "EOF"),
]
WORDS = [*NASTY, "$$", "$$(HOME)", "$(HOME)", "${HOME}", "y", "on", "1e3", "0o17", "1:30", "null", "~", "#"]
WORDS += ["- a", "\x07"]


def job(
    *script: str, file: Path | None = None, variables: dict[str, str] | None = None, **flags: Any
) -> Submission:
    return assemble({"engine": "slurm", **flags}, script, file, variables or {})


def program(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        terminal.run(cli.app, "ps-server", ["submit", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def documents(engine: str, *script: str, **flags: Any) -> list[dict[str, Any]]:
    given = {"engine": engine, "image": IMAGE, "workers": 4, **flags}
    text = ENGINES[engine].render(assemble(given, script, None, {}))
    return list(yaml.safe_load_all(text))


def kinds(*script: str, **flags: Any) -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in documents("kubernetes", *script, **flags)}


def jobs(*script: str, **flags: Any) -> dict[str, dict[str, Any]]:
    """Returns the Jobs of the JobSet, by name."""
    found = kinds(*script, **flags)
    spec = (
        found["JobSet"]["spec"] if "JobSet" in found else found["TrainingRuntime"]["spec"]["template"]["spec"]
    )
    return {one["name"]: one["template"]["spec"] for one in spec["replicatedJobs"]}


def inside(job: dict[str, Any]) -> dict[str, Any]:
    (container,) = job["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def expanded(word: str) -> str:
    """Expands a word of a command like the kubelet, without any variables."""
    return re.sub(r"\$(\$|\([^)]*\))", lambda found: "$" if found[1] == "$" else found[0], word)

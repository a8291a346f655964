"""Docker Compose itself reads the files that `ps-server submit` prints."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hubring.ps.submit.engine import ENGINES
from hubring.ps.submit.job import assemble
from tests.support.needs import needs
from tests.support.submissions import IMAGE, WORDS


def there_is_compose() -> bool:
    docker = shutil.which("docker")
    return (
        docker is not None
        and subprocess.run([docker, "compose", "version"], capture_output=True).returncode == 0
    )


pytestmark = [
    pytest.mark.slow,
    *needs(there_is_compose(), "docker compose", "apt-get install docker-compose"),
]


def read(*script: str, **flags: Any) -> dict[str, Any]:
    """The file as Compose understands it."""
    job = assemble({"engine": "compose", "image": IMAGE, **flags}, script, None, {})
    asked = subprocess.run(
        ["docker", "compose", "-f", "-", "config", "--format", "json"],
        input=ENGINES["compose"].render(job),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert asked.returncode == 0, asked.stderr
    assert "level=warning" not in asked.stderr, asked.stderr
    found: dict[str, Any] = json.loads(asked.stdout)
    return found


def test_arguments_arrive_as_they_are() -> None:
    worker = read("train.py", *WORDS, workers=4)["services"]["worker"]
    # What it shows may be read again as a Compose file, so each dollar is a pair.
    entrypoint = [word.replace("$$", "$") for word in worker["entrypoint"]]
    assert entrypoint[entrypoint.index("--") :] == ["--", "train.py", *WORDS]
    assert worker["deploy"]["replicas"] == 4


@pytest.mark.parametrize(
    "flags",
    [
        {"workers": 2, "checkpoint_dir": Path("/kept"), "colocate": True},
        {"gpus": 2, "topology": "ring", "backend": "nccl"},
    ],
)
def test_every_kind_of_file_is_taken(flags: dict[str, Any]) -> None:
    assert set(read("train.py", **flags)["services"]) == {"server", "worker"}

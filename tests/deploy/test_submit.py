"""What `ps-server submit --engine compose` prints, on a real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.deploy.conftest import Yard
from tests.deploy.fleet import results
from tests.deploy.image import IMAGE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

JOB = "submitted"


@pytest.mark.parametrize("topology", ["hub", "ring"])
def test_submit_runs_the_job_to_its_end(yard: Yard, topology: str) -> None:
    flags = ["--workers", "2", "--job-name", JOB, "--image", IMAGE, "--topology", topology, "--cpus", "1"]
    words = [*flags, "--checkpoint-dir", "/checkpoints", "--", "--epochs", "2"]
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "hubring.ps.cli", "submit", "--engine", "compose", *words],
            env={**os.environ, **yard.engine.environment},
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        lines = ended.stdout.splitlines()
        last: dict[str, Any] = json.loads(lines[-1])
        assert (last["engine"], last["job"], last["exit_code"]) == ("compose", JOB, 0)
        told = results("\n".join(lines[:-1]))
        (server,) = [one for one in told if "finished" in one]
        assert (server["finished"], server["exit_code"]) == ([0, 1], 0)
        assert sorted(one["rank"] for one in told if "rank" in one) == [0, 1]
    finally:
        yard.engine.run("compose", "--project-name", JOB, "down", "--volumes", "--timeout", "1")

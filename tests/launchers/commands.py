"""Commands that launchers run, and what their workers print."""

from __future__ import annotations

import json
import sys
from typing import Any


def worker(*arguments: str) -> list[str]:
    """The command that is the same under every launcher."""
    return [sys.executable, "-m", "hubring.workers.programs.ps_worker", *arguments]


def told(output: str) -> list[dict[str, Any]]:
    """The results among the lines, by rank."""
    objects = [line[line.index('{"rank"') :] for line in output.splitlines() if '{"rank"' in line]
    return sorted((json.loads(line) for line in objects), key=lambda one: one["rank"])


def torchrun(count: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", "--no-python"]

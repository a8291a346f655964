"""What a comparison ran on."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

DECIDING = ("processor", "cores", "hubring", "torch", "grpcio", "pyzmq")
"""Of `describe`: what numbers depend on."""


def describe() -> dict[str, str | int]:
    """Processor, cores that this process may use, system, and the versions that matter."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("hubring", "torch", "grpcio", "pyzmq")},
    }


def name_site(described: Mapping[str, Any]) -> str:
    """Where a comparison runs, in words: one machine, or a launcher's with their ranks.

    Args:
        described: What `describe` gives, and for several machines `launcher` and `hosts` beside it.
    """
    if "launcher" not in described:
        return "one machine without a launcher"
    hosts = [
        f"{name} (ranks {host['ranks']}; {host['cores']} cores, {host['processor']}, {host['system']})"
        for name, host in described["hosts"].items()
    ]
    return f"{described['launcher']}'s {', '.join(hosts)}"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    """The model's name where Linux tells it; elsewhere what Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

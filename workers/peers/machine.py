"""The machine of a comparison: its processor, cores and GPUs, and the GPU of each rank."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def why_no_gpu() -> str:
    """Returns why rows cannot run on a GPU; empty if they can."""
    import torch  # imported here so that listing the rows does not import torch

    return "" if torch.cuda.is_available() else "torch finds no CUDA device on this host"


def gpu_count() -> int:
    """Returns the number of GPUs that torch finds."""
    import torch

    return torch.cuda.device_count()


def gpu_variables(rank: int, size: int, gpus: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of a rank if there are fewer GPUs than ranks; otherwise none.

    In that case all ranks use the first GPU. NCCL refuses two ranks of one host on one GPU, so each rank gets
    a different NCCL_HOSTID.
    """
    if gpus >= size:
        return {}
    return {_VISIBLE: environment.get(_VISIBLE, "0").split(",")[0], "NCCL_HOSTID": f"rank{rank}"}


def free_bytes() -> int:
    """Returns the memory that new processes can use without swapping, in bytes."""
    import psutil

    return int(psutil.virtual_memory().available)


DECIDING = ("processor", "cores", "gpus", "system", "python", "hubring", "torch", "grpcio", "pyzmq")
"""Keys of `describe` on which numbers depend."""

_GPUS = Path("/proc/driver/nvidia/gpus")
"""Where NVIDIA's driver lists GPUs. Asking torch would take memory of the GPU."""


def describe() -> dict[str, str | int]:
    """Returns the processor, the cores that this process can use, the GPUs, the system and versions."""
    return {
        "processor": _processor(),
        "cores": cores(),
        **gpus(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("hubring", "torch", "grpcio", "pyzmq")},
    }


def name_site(described: Mapping[str, Any]) -> str:
    """Describes where a comparison runs: one machine, or a launcher's hosts with their ranks.

    Args:
        described: The result of `describe`; for several machines also `launcher` and `hosts`.
    """
    if "launcher" not in described:
        return "one machine without a launcher"
    hosts = [
        f"{name} (ranks {host['ranks']}; {', '.join(_parts(host))})"
        for name, host in described["hosts"].items()
    ]
    return f"{described['launcher']}'s {', '.join(hosts)}"


def _parts(host: Mapping[str, Any]) -> list[str]:
    gpus = [host["gpus"]] if "gpus" in host else []
    return [f"{host['cores']} cores", host["processor"], *gpus, host["system"]]


def gpus() -> dict[str, str]:
    """Returns the number and the models of the NVIDIA GPUs as `gpus`; empty without any."""
    texts = [file.read_text() for file in sorted(_GPUS.glob("*/information"))]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("Model:")]
    models = Counter(line.partition(":")[2].strip() for line in lines)
    return {"gpus": ", ".join(f"{count} x {name}" for name, count in models.items())} if models else {}


def cores() -> int:
    """Returns the number of cores that this process can use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    """Returns the model's name on Linux, elsewhere what Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

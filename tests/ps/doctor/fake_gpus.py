"""Lets torch find GPUs that are not here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hubring.ps.doctor.finding import GIB


def see_gpus(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], count: int = 2) -> None:
    """Lets torch be one that is built for CUDA and finds GPUs; what is computed there is on the CPU."""
    ones, full = torch.ones, torch.full
    properties = SimpleNamespace(name="NVIDIA H100", total_memory=80 * GIB)
    properties.major, properties.minor = capability
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))
    monkeypatch.setattr(torch, "full", lambda *arguments, device: full(*arguments))
    for name, value in {
        "is_available": True,
        "init": None,
        "get_arch_list": ["sm_90"],
        "device_count": count,
        "get_device_properties": properties,
        "mem_get_info": (70 * GIB, 80 * GIB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)

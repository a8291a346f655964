"""GPUs that a machine does not have.

In a GPU's fake memory, memory handles are names in a dictionary, and events are a lazy device's.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hubring.ps.compression.gpu_tensor import CudaMemory, GpuTensor, Mark
from hubring.ps.core.errors import ConfigError
from tests.support.fakes.lazy_device import LazyDevice

GPU = "GPU-fake"


class FakeMemory(CudaMemory):
    """The GPU as all processes see it; `device.log` lists the stamps that a process has waited for."""

    def __init__(self) -> None:
        self.device = LazyDevice()
        self.opened: list[bytes] = []
        self._storages: dict[bytes, Tensor] = {}
        self._events: dict[bytes, Mark] = {}

    def share(self, tensor: Tensor) -> GpuTensor:
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        handle = str(storage.data_ptr()).encode()
        self._storages[handle] = storage
        whole = GpuTensor(handle, storage.numel(), 0, b"", 0, b"", False)
        return whole.part(tensor.data_ptr() - storage.data_ptr())

    def reach(self, there: GpuTensor) -> Tensor:
        self.opened.append(there.handle)
        if there.handle not in self._storages:
            raise ConfigError("cannot reach another process's memory")
        return self._storages[there.handle]

    def stamp(self, tensor: Tensor) -> bytes:
        event = f"{tensor.data_ptr()}".encode()
        self.device.compute("step", lambda: None)
        self._events[event] = self.device.mark()
        return event

    def mark(self, event: bytes) -> Mark:
        return self._events[event]


def has_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

"""Shares a GPU's memory between processes with CUDA IPC, as torch offers it.

torch counts the users of a shared storage (`torch.multiprocessing.reductions`). Its owner
can free it at any time; the memory is released when the last user releases it. So each end
opens a storage once and holds it for as long as it uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError
from hubring.ps.store.gpu_tensor import GpuTensor, Mark


class CudaMemory:
    """The memory of one CUDA device.

    Args:
        device: With its index in this process. Another process may number devices differently.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stamps: dict[int, torch.cuda.Event] = {}
        self._marks: dict[bytes, torch.cuda.Event] = {}

    def share(self, tensor: Tensor) -> GpuTensor:
        with _explained("share memory of"):
            _, *names = tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        return GpuTensor(*names).part(int(tensor.storage_offset()) * tensor.element_size())

    def reach(self, there: GpuTensor) -> Tensor:
        with _explained("reach another process's memory on"):
            storage = torch.UntypedStorage._new_shared_cuda(
                self._device.index,
                there.handle,
                there.nbytes,
                there.start,
                there.counter,
                there.counter_offset,
                there.shared,
                there.waits,
            )
            whole = torch.empty(0, dtype=torch.uint8, device=self._device)
            return whole.set_(storage, 0, (there.nbytes,), (1,))

    def stamp(self, tensor: Tensor) -> bytes:
        with _explained("share an event of"):
            event = self._stamps.setdefault(tensor.data_ptr(), _shared_event())
            event.record(torch.cuda.current_stream(self._device))
            handle: bytes = event.ipc_handle()  # type: ignore[no-untyped-call]
        return handle

    def mark(self, event: bytes) -> Mark:
        if event not in self._marks:
            with _explained("reach another process's event on"):
                self._marks[event] = torch.cuda.Event.from_ipc_handle(self._device, event)  # type: ignore[no-untyped-call]
        return self._marks[event]


def gpu_name(device: torch.device) -> str:
    """Returns the GPU's UUID name, which is the same in every process and container."""
    properties: Any = torch.cuda.get_device_properties(device)
    return f"GPU-{properties.uuid}"


def _shared_event() -> torch.cuda.Event:
    return torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns CUDA errors into ConfigError."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"cannot {what} the GPU ({error}). Run server and workers on the same host, in one container or"
            " with --ipc=host, and without PYTORCH_CUDA_ALLOC_CONF=expandable_segments; or start the server"
            " with --device cpu"
        ) from error

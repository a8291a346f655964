"""The memory of a shard's tensors: on the host or on a GPU.

The store's rules are the same for both. Only input and output differ: transports
read and write host memory directly, but not a GPU's. Both allocate zeroed memory, flat
uint8, for one store. It replaces the earlier memory, unless it `extends` it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from hubring.ps.compression import gpu_tensor
from hubring.ps.compression.gpu_tensor import CudaMemory, Reached, gpu_name, is_placed
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import Coded
from hubring.ps.core.types import Sender
from hubring.ps.optim.sums import zeros

log = logging.getLogger(__name__)


class HostMemory:
    """Host memory, which transports read and write directly.

    Args:
        allocate: Allocates this many bytes of zeroed memory; None uses private memory.
    """

    device = torch.device("cpu")

    def __init__(self, allocate: Callable[[int], memoryview] | None = None) -> None:
        self._allocate = allocate

    def allocate(self, nbytes: int, *, extends: bool = False) -> Tensor:
        if self._allocate is None or nbytes == 0:
            return zeros(nbytes, torch.uint8)
        return torch.frombuffer(self._allocate(nbytes), dtype=torch.uint8)


class GpuMemory:
    """A GPU's memory.

    Gradients from a transport are copied to the GPU on arrival. Gradients of workers
    on the same GPU are read in place. Such a worker sends a location only when the
    gradient is complete. It sends the next location only after it has read the values
    for the previous one. So one event per reply is enough to order all accesses.

    Args:
        device: The GPU.
        memory: The GPU's memory, shared with other processes.
    """

    def __init__(self, device: torch.device, memory: CudaMemory) -> None:
        self.device = device
        self._memory = memory
        self._token: Tensor | None = None
        """The bytes that the invitation refers to."""
        self._wholes: list[Tensor] = []
        self._shared: dict[int, gpu_tensor.GpuTensor] = {}
        """By the address of the whole."""
        self._reached: dict[Sender, Reached] = {}

    @classmethod
    def on(cls, name: str) -> GpuMemory:
        """Returns the memory of this GPU, and makes the GPU the process's current device.

        Raises:
            ConfigError: This host does not have the GPU.
        """
        device = find_gpu(name)
        torch.cuda.set_device(device)
        return cls(device, CudaMemory(device))

    def invitation(self) -> dict[str, str]:
        """Returns an address that invites workers of the same GPU; none if they cannot share its memory."""
        secret = bytearray(secrets.token_bytes(16))
        self._token = torch.frombuffer(secret, dtype=torch.uint8).to(self.device)
        try:
            text = gpu_tensor.invitation(gpu_name(self.device), self._memory, self._token)
        except ConfigError as error:
            log.warning("workers on this GPU exchange tensors through host memory: %s", error)
            return {}
        return {gpu_tensor.ADDRESS: text}

    def allocate(self, nbytes: int, *, extends: bool = False) -> Tensor:
        if not extends:
            self._wholes.clear()
            self._shared.clear()
        self._wholes.append(torch.zeros(nbytes, dtype=torch.uint8, device=self.device))
        return self._wholes[-1]

    def take(self, gradient: Tensor | Coded, sender: Sender) -> Tensor | Coded:
        """Returns a gradient on this device for a round.

        Raises:
            ConfigError: The gradient's location cannot be opened.
        """
        if not isinstance(gradient, Coded):
            return gradient.to(self.device, copy=True)
        assert is_placed(gradient), "a GPU's shard refuses a plan with compressed gradients"
        reached = self._reached.setdefault(sender, Reached(self._memory))
        return reached.tensor(gradient)[0]

    def send(self, values: Tensor) -> Tensor:
        """Returns a copy of values on the CPU for a transport."""
        return values.to("cpu", copy=True)

    def show(self, values: Tensor) -> Coded:
        """Returns the location of values for a worker on the same device, after all work queued for them."""
        address = values.data_ptr()
        whole = next(one for one in self._wholes if 0 <= address - one.data_ptr() < one.numel())
        if whole.data_ptr() not in self._shared:
            self._shared[whole.data_ptr()] = self._memory.share(whole)
        offset = address - whole.data_ptr()
        place = self._shared[whole.data_ptr()].part(offset, self._memory.stamp(values))
        return gpu_tensor.placed(gpu_tensor.encode(place), values)

    def retain(self, senders: Collection[Sender]) -> None:
        """Closes the opened memory of all other senders."""
        for sender in self._reached.keys() - set(senders):
            del self._reached[sender]


ParameterMemory = HostMemory | GpuMemory


def find_gpu(name: str) -> torch.device:
    """Returns the GPU for `cuda` or `cuda:N`.

    Raises:
        ConfigError: This host does not have the GPU.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(name.partition(":")[2] or 0)
    if count == 0:
        built = "" if torch.version.cuda else " (a build without CUDA)"
        raise ConfigError(
            f"--device {name}: torch{built} finds no GPU on this host; use --device cpu, or run ps-server"
            " doctor to find the cause"
        )
    if index >= count:
        names = f"cuda:0 to cuda:{count - 1}" if count > 1 else "cuda:0"
        raise ConfigError(f"--device {name}: torch finds only {count} GPU(s) on this host; use {names}")
    return torch.device("cuda", index)

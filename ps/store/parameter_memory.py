"""Where a shard keeps its tensors: host memory, or a GPU's.

The store's rules are the same in both. Only what comes in and what goes out
differs: the host's memory is what wires read and write, a GPU's is not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

import torch
from torch import Tensor

from hubring.ps.core.messages import Coded
from hubring.ps.core.types import Sender
from hubring.ps.optim.zeros import zeros
from hubring.ps.store import gpu_tensor
from hubring.ps.store.gpu_tensor import Reached, SharedMemory, is_placed


class ParameterMemory(Protocol):
    """Memory of one kind.

    Attributes:
        device: Where it is.
        shows: Processes on the same device may give and read tensors where they lie.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def shows(self) -> bool: ...

    def allocate(self, nbytes: int) -> Tensor:
        """Zeroed memory, flat uint8, for one store; it takes the place of the last store's."""

    def take(self, gradient: Tensor | Coded, sender: Sender) -> Tensor | Coded:
        """A gradient as a round keeps it: at home, but for those in a compressor's codec.

        Raises:
            ConfigError: It names a place that cannot be reached.
        """

    def send(self, values: Tensor) -> Tensor:
        """Values as they travel: on the CPU, and left alone until they change at home."""

    def show(self, values: Tensor) -> Coded:
        """Values as one on the same device is told of them, behind what was queued for them so far."""

    def retain(self, senders: Collection[Sender]) -> None:
        """Lets go of what others' memory holds of all but these."""


class HostMemory:
    """Host memory: wires read and write it as it is.

    Args:
        allocate: Makes zeroed memory of so many bytes; None: it is this process's alone.
    """

    device = torch.device("cpu")
    shows = False

    def __init__(self, allocate: Callable[[int], memoryview] | None = None) -> None:
        self._allocate = allocate

    def allocate(self, nbytes: int) -> Tensor:
        if self._allocate is None or nbytes == 0:
            return zeros(nbytes, torch.uint8)
        return torch.frombuffer(self._allocate(nbytes), dtype=torch.uint8)

    def take(self, gradient: Tensor | Coded, sender: Sender) -> Tensor | Coded:
        return gradient

    def send(self, values: Tensor) -> Tensor:
        return values

    def show(self, values: Tensor) -> Coded:
        raise AssertionError("host memory is shown by the shared-memory transport, not by its place")

    def retain(self, senders: Collection[Sender]) -> None:
        """Nothing of theirs is held."""


class GpuMemory:
    """A GPU's memory.

    What workers send is copied there when it comes. What workers on the same GPU
    place there is read where it lies; a worker places a gradient when it is
    whole, and places the next one when it is done with the values shown for this
    one, so an event of ours for each answer is all the order that is needed.

    Args:
        device: The GPU.
        memory: Its memory, as other processes see it.
    """

    shows = True

    def __init__(self, device: torch.device, memory: SharedMemory) -> None:
        self.device = device
        self._memory = memory
        self._whole = torch.empty(0)
        self._shared: gpu_tensor.GpuTensor | None = None
        self._reached: dict[Sender, Reached] = {}

    def allocate(self, nbytes: int) -> Tensor:
        self._whole = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        self._shared = None
        return self._whole

    def take(self, gradient: Tensor | Coded, sender: Sender) -> Tensor | Coded:
        if not isinstance(gradient, Coded):
            return gradient.to(self.device, copy=True)
        assert is_placed(gradient), "compressed gradients are refused with the plan"
        reached = self._reached.setdefault(sender, Reached(self._memory))
        return reached.tensor(gradient)[0]

    def send(self, values: Tensor) -> Tensor:
        return values.to("cpu", copy=True)

    def show(self, values: Tensor) -> Coded:
        self._shared = self._shared or self._memory.share(self._whole)
        offset = values.data_ptr() - self._whole.data_ptr()
        place = self._shared.part(offset, self._memory.stamp(values))
        return gpu_tensor.placed(gpu_tensor.encode(place), values)

    def retain(self, senders: Collection[Sender]) -> None:
        for sender in self._reached.keys() - set(senders):
            del self._reached[sender]

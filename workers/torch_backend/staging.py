"""Tensors of the script as flat tensors in host memory, which an exchange reads and writes.

A dense tensor on the CPU is used in place. Any other one has a copy; a tensor on a GPU has it in pinned
memory, and the thread of the exchange waits for the copies, not the script.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Staged:
    """A tensor of the script and its flat host memory.

    Args:
        tensor: A dense tensor.
        read: Whether its content is needed.
        write: Whether it gets a result. Otherwise it stays as it is, for autograd too.

    Attributes:
        flat: The host memory.
    """

    def __init__(self, tensor: Tensor, *, read: bool = True, write: bool = True) -> None:
        self._write = write
        with torch.inference_mode(False):  # another thread, which is not in this mode, writes the result
            self._stage(tensor.detach(), read)

    def _stage(self, tensor: Tensor, read: bool) -> None:
        lazy = tensor.is_neg() or tensor.is_conj()  # its memory does not have its values
        if tensor.is_inference() and not lazy:
            like = tensor.storage_offset(), tensor.shape, tensor.stride()
            tensor = tensor.new_empty(0).set_(tensor.untyped_storage(), *like)
        self._tensor = self._room = tensor
        self._copied: torch.cuda.Event | None = None
        self._in_place = tensor.device.type == "cpu" and tensor.is_contiguous() and not lazy
        if not self._in_place:
            on_gpu = tensor.device.type == "cuda"
            self._room = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=on_gpu)
            if read:
                self._room.copy_(tensor, non_blocking=on_gpu)
            if on_gpu:
                self._copied = torch.cuda.Event()
                self._copied.record(torch.cuda.current_stream(tensor.device))
        real = torch.view_as_real(self._room) if tensor.is_complex() else self._room
        self.flat = real.view(-1)

    @property
    def data(self) -> Tensor:
        """The flat memory as bytes."""
        return self.flat.view(torch.uint8)

    def await_copy(self) -> None:
        """Returns once `flat` has the tensor's content."""
        if self._copied is not None:
            self._copied.synchronize()

    def land(self) -> None:
        """Writes `flat` to the tensor, if it gets a result."""
        if self._in_place or not self._write:
            return
        if self._copied is None:
            self._tensor.copy_(self._room)
            return
        stream = torch.cuda.Stream(self._tensor.device)
        with torch.cuda.stream(stream):
            self._tensor.copy_(self._room, non_blocking=True)
        stream.synchronize()


def staged(tensors: Sequence[Tensor], *, read: bool = True, write: bool = True) -> list[Staged]:
    """Returns the staged forms of some tensors.

    Raises:
        TypeError: A tensor is sparse, or on a device that is neither CPU nor CUDA.
    """
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"the tensor is {tensor.layout}: only all_reduce supports sparse tensors; use to_dense()"
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise TypeError(
                f"the tensor is on {tensor.device}: hubring exchanges tensors on CPU and CUDA devices"
            )
    return [Staged(tensor, read=read, write=write) for tensor in tensors]


def joined(parts: Sequence[Staged]) -> Tensor:
    """Returns the bytes of several tensors as one tensor; of one tensor its own memory."""
    return parts[0].data if len(parts) == 1 else torch.cat([part.data for part in parts])


def deal(data: Tensor, parts: Sequence[Staged]) -> None:
    """Writes bytes to several tensors, unless `data` is the only one's own memory."""
    if len(parts) > 1:
        for part, piece in zip(parts, data.split([part.data.numel() for part in parts]), strict=True):
            part.data.copy_(piece)

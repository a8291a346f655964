"""Tensors that stay in a GPU's memory: a message contains only their location.

Server and workers on one GPU read each other's memory, so gradients and parameters never leave the GPU. For
all code in between, such a tensor is compressed with a codec (`Coded`) whose payload is the location. Only
sender and receiver interpret it.

The memory is shared with CUDA IPC, as torch offers it. torch counts the users of a shared storage
(`torch.multiprocessing.reductions`). Its owner can free it at any time; the memory is released when the last
user releases it. So each end opens a storage once and holds it for as long as it uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import Coded
from hubring.ps.core.torch_internals import open_shared_storage, share_storage

CODEC = "cuda-ipc"
"""The codec's name in headers. It is no `--compress` value: workers detect whether they can use it."""

ADDRESS = "cuda"
"""The key of an invitation among a shard's addresses. It belongs to the store, not to a transport."""

MAX_BYTES = 1024
"""The most bytes of an encoded location."""


class GpuTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's location, in the terms of CUDA's and torch's inter-process communication.

    Attributes:
        handle: Handle of the allocation that contains the storage.
        nbytes: Bytes of the storage.
        start: Offset of the storage in its allocation, in bytes.
        counter: Handle of torch's reference counters.
        counter_offset: Index of the storage's counter.
        shared: Event after the work that was queued for the storage when it was first shared.
        waits: Whether a reader must wait for `shared`.
        offset: Offset of the tensor in its storage, in bytes.
        ready: Event after the last write to the tensor; empty if the reader knows that it is complete.
    """

    handle: bytes
    nbytes: int
    start: int
    counter: bytes
    counter_offset: int
    shared: bytes
    waits: bool
    offset: int = 0
    ready: bytes = b""

    def part(self, offset: int, ready: bytes = b"") -> GpuTensor:
        """Returns the location `offset` bytes further in the same storage."""
        return msgspec.structs.replace(self, offset=self.offset + offset, ready=ready)


class Mark(Protocol):
    """A point in a GPU's queue, reached when all earlier work is done."""

    def synchronize(self) -> None:
        """Blocks the calling thread until the mark is reached."""


class Reached:
    """The opened memory of one peer: each storage is opened once.

    Args:
        memory: The memory of the GPU that both use.
    """

    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory
        self._storages: dict[GpuTensor, Tensor] = {}

    def tensor(self, there: Coded) -> tuple[Tensor, GpuTensor]:
        """Returns the tensor of a message, and its location.

        Raises:
            ConfigError: The tensor's storage cannot be opened.
        """
        place = decode(there.payload)
        storage = msgspec.structs.replace(place, offset=0, ready=b"")
        if storage not in self._storages:
            self._storages[storage] = self._memory.reach(storage)
        end = place.offset + there.numel * there.dtype.itemsize
        return self._storages[storage][place.offset : end].view(there.dtype), place


def placed(payload: Tensor, tensor: Tensor) -> Coded:
    """Returns `tensor` as a message refers to it; `payload` holds its encoded location."""
    return Coded(CODEC, payload, tensor.numel(), tensor.dtype)


def is_placed(tensor: Tensor | Coded) -> bool:
    """Returns whether a message contains a location instead of values."""
    return isinstance(tensor, Coded) and tensor.codec == CODEC


def encode(there: GpuTensor) -> Tensor:
    """Encodes a location: flat uint8."""
    code = msgspec.msgpack.encode(there)
    assert len(code) <= MAX_BYTES, "torch's handles have grown"
    return torch.frombuffer(bytearray(code), dtype=torch.uint8)


def decode(code: Tensor) -> GpuTensor:
    """Decodes a location.

    Raises:
        ConfigError: The bytes are not a location of this version.
    """
    try:
        return msgspec.msgpack.decode(code.numpy().tobytes(), type=GpuTensor)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{code.numel()} bytes are not a location in GPU memory: {error}") from error


def check(code: Tensor, numel: int, dtype: torch.dtype) -> None:
    """Checks that an encoded location has room for this many elements.

    Raises:
        ConfigError: The code is invalid, or the elements exceed the storage.
    """
    there = decode(code)
    end = there.offset + numel * dtype.itemsize
    if there.offset < 0 or there.offset % dtype.itemsize or end > there.nbytes:
        raise ConfigError(
            f"{numel} elements of {dtype} at byte {there.offset} do not fit in {there.nbytes} bytes"
        )


# How a worker detects shared memory: a shard's invitation has the location and values of bytes on its GPU.


def invitation(gpu: str, memory: CudaMemory, token: Tensor) -> str:
    """Returns a store's invitation; `token` (flat uint8, on its GPU) must live as long as the shard."""
    code = encode(memory.share(token))
    return "/".join([gpu, bytes(code.tolist()).hex(), bytes(token.tolist()).hex()])


def accept(text: str, gpu: str, memory: CudaMemory) -> None:
    """Checks that this process can read the memory of the shard with this invitation.

    Raises:
        ConfigError: It cannot.
    """
    theirs, code, token = text.split("/")
    if theirs != gpu:
        raise ConfigError(f"the server's parameters are on {theirs}, but this worker's are on {gpu}")
    payload = torch.frombuffer(bytearray.fromhex(code), dtype=torch.uint8)
    seen, _ = Reached(memory).tensor(Coded(CODEC, payload, len(token) // 2, torch.uint8))
    if bytes(seen.tolist()).hex() != token:
        raise ConfigError(f"GPU memory sharing does not work on {gpu}: bytes differ")


class CudaMemory:
    """The memory of one CUDA device, shared between processes.

    Args:
        device: With its index in this process. Another process may number devices differently.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stamps: dict[int, torch.cuda.Event] = {}
        self._marks: dict[bytes, torch.cuda.Event] = {}

    def share(self, tensor: Tensor) -> GpuTensor:
        """Returns the tensor's location. The tensor must live as long as another process may read it."""
        with _explained("share memory of"):
            names = share_storage(tensor)
        return GpuTensor(*names).part(int(tensor.storage_offset()) * tensor.element_size())

    def reach(self, there: GpuTensor) -> Tensor:
        """Opens the whole storage of another process's tensor: flat uint8, valid while the result lives.

        Raises:
            ConfigError: The storage cannot be opened.
        """
        with _explained("reach another process's memory on"):
            *names, _, _ = msgspec.structs.astuple(there)  # `offset` and `ready` are not torch's
            storage = open_shared_storage(self._device.index, tuple(names))
            whole = torch.empty(0, dtype=torch.uint8, device=self._device)
            return whole.set_(storage, 0, (there.nbytes,), (1,))

    def stamp(self, tensor: Tensor) -> bytes:
        """Records an event after all work that this process has queued; reuses one event per tensor."""
        with _explained("share an event of"):
            made = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
            event = self._stamps.setdefault(tensor.data_ptr(), made)
            event.record(torch.cuda.current_stream(self._device))
            handle: bytes = event.ipc_handle()  # type: ignore[no-untyped-call]
        return handle

    def mark(self, event: bytes) -> Mark:
        """Returns another process's event."""
        if event not in self._marks:
            with _explained("reach another process's event on"):
                self._marks[event] = torch.cuda.Event.from_ipc_handle(self._device, event)  # type: ignore[no-untyped-call]
        return self._marks[event]


def gpu_name(device: torch.device) -> str:
    """Returns the GPU's UUID name, which is the same in every process and container."""
    properties: Any = torch.cuda.get_device_properties(device)
    return f"GPU-{properties.uuid}"


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

"""Tensors that do not travel: their messages name where they lie in a GPU's memory.

Server and workers on one GPU read each other's memory, so a gradient or a
parameter need not leave it. To everything between them it is a tensor in a
codec (`Coded`), and its code is its place; only the two ends know better.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import Coded

CODEC = "cuda-ipc"
"""As headers name it. No job is started with it: the workers that can use it find out."""

ADDRESS = "cuda"
"""Where an invitation stands among a shard's addresses: it is of no wire, but of the store."""

MAX_BYTES = 1024
"""Of a place's code, at most."""


class GpuTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's place, as CUDA's and torch's inter-process communication spell it.

    Attributes:
        handle: Of the allocation that the storage lies in.
        nbytes: Of the storage.
        start: Of the storage in its allocation, in bytes.
        counter: Where torch counts who uses the storage.
        counter_offset: Which of the counters there.
        shared: Event behind what had been queued for the storage when it was first shared.
        waits: Whether that must be waited for.
        offset: Of the tensor in its storage, in bytes.
        ready: Event behind the last write to the tensor; empty where its reader knows that it is over.
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
        """The place that begins `offset` bytes further on, in the same storage."""
        return msgspec.structs.replace(self, offset=self.offset + offset, ready=ready)


class Mark(Protocol):
    """A place in a GPU's queue, reached when all before it is done."""

    def synchronize(self) -> None:
        """Lets the calling thread sleep until the mark is reached."""


class SharedMemory(Protocol):
    """One GPU's memory, as processes that share it see it."""

    def share(self, tensor: Tensor) -> GpuTensor:
        """Where others find the tensor, which must live as long as they may look there."""

    def reach(self, there: GpuTensor) -> Tensor:
        """The whole storage of another process's tensor: flat uint8, and valid as long as it is held here.

        Raises:
            ConfigError: It cannot be reached; says why.
        """

    def stamp(self, tensor: Tensor) -> bytes:
        """An event behind all that this process has queued so far; one for each tensor, used anew."""

    def mark(self, event: bytes) -> Mark:
        """Another process's event."""


class Reached:
    """What is held of one peer's memory: each storage is opened once.

    Args:
        memory: The GPU's that both use.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._storages: dict[GpuTensor, Tensor] = {}

    def tensor(self, there: Coded) -> tuple[Tensor, GpuTensor]:
        """The tensor that a message names, and its place.

        Raises:
            ConfigError: It cannot be reached; says why.
        """
        place = decode(there.payload)
        storage = msgspec.structs.replace(place, offset=0, ready=b"")
        if storage not in self._storages:
            self._storages[storage] = self._memory.reach(storage)
        end = place.offset + there.numel * there.dtype.itemsize
        return self._storages[storage][place.offset : end].view(there.dtype), place


def placed(payload: Tensor, tensor: Tensor) -> Coded:
    """`tensor` as a message names it, once `payload` holds its place."""
    return Coded(CODEC, payload, tensor.numel(), tensor.dtype)


def is_placed(tensor: Tensor | Coded) -> bool:
    """Whether what came is a place."""
    return isinstance(tensor, Coded) and tensor.codec == CODEC


def encode(there: GpuTensor) -> Tensor:
    """A place's code: flat uint8."""
    code = msgspec.msgpack.encode(there)
    assert len(code) <= MAX_BYTES, "torch's handles have grown"
    return torch.frombuffer(bytearray(code), dtype=torch.uint8)


def decode(code: Tensor) -> GpuTensor:
    """The place that `encode` coded.

    Raises:
        ConfigError: No peer of this version sends this.
    """
    try:
        return msgspec.msgpack.decode(code.numpy().tobytes(), type=GpuTensor)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{code.numel()} bytes that name no place in a GPU's memory: {error}") from error


def check(code: Tensor, numel: int, dtype: torch.dtype) -> None:
    """Refuses a code that names no place for so many elements.

    Raises:
        ConfigError: Says what is wrong.
    """
    there = decode(code)
    end = there.offset + numel * dtype.itemsize
    if there.offset < 0 or there.offset % dtype.itemsize or end > there.nbytes:
        raise ConfigError(
            f"{numel} elements of {dtype} at byte {there.offset} do not lie in {there.nbytes} bytes"
        )


# How a worker finds out that it can: a shard's address names some bytes on its GPU, and what they are.


def invitation(gpu: str, memory: SharedMemory, token: Tensor) -> str:
    """Tells workers where a store is; `token` (flat uint8, on its GPU) must live as long as the shard."""
    code = encode(memory.share(token))
    return "/".join([gpu, bytes(code.tolist()).hex(), bytes(token.tolist()).hex()])


def accept(text: str, gpu: str, memory: SharedMemory) -> None:
    """Makes sure that this process reads the memory of the shard that gave this invitation.

    Raises:
        ConfigError: It does not; says why.
    """
    theirs, code, token = text.split("/")
    if theirs != gpu:
        raise ConfigError(f"the server's store is on {theirs}, and the parameters are on {gpu}")
    payload = torch.frombuffer(bytearray.fromhex(code), dtype=torch.uint8)
    seen, _ = Reached(memory).tensor(Coded(CODEC, payload, len(token) // 2, torch.uint8))
    if bytes(seen.tolist()).hex() != token:
        raise ConfigError(f"other bytes lie on {gpu} than the server put there")

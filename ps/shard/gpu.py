"""`--device`: the GPU that holds a shard's parameters."""

from __future__ import annotations

import logging
import secrets
from typing import NamedTuple

import torch

from hubring.ps.compression import gpu_tensor
from hubring.ps.compression.gpu_tensor import CudaMemory, gpu_name
from hubring.ps.core.errors import ConfigError
from hubring.ps.store.parameter_memory import GpuMemory

log = logging.getLogger(__name__)


class Room(NamedTuple):
    """A shard's memory on a GPU, and its invitation for workers.

    Attributes:
        parameters: The store's memory.
        addresses: The invitation, in addition to the shard's other addresses.
        token: The bytes that the invitation refers to; must live as long as the shard.
    """

    parameters: GpuMemory
    addresses: dict[str, str]
    token: torch.Tensor


def find(name: str) -> torch.device:
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


def room(name: str) -> Room:
    """Creates the memory for parameters on this GPU, and makes the GPU the process's current device.

    Raises:
        ConfigError: This host does not have the GPU.
    """
    device = find(name)
    torch.cuda.set_device(device)
    memory = CudaMemory(device)
    token = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8).to(device)
    parameters = GpuMemory(device, memory)
    try:
        invitation = gpu_tensor.invitation(gpu_name(device), memory, token)
    except ConfigError as error:
        log.warning("workers on this GPU exchange tensors through host memory: %s", error)
        return Room(parameters, {}, token)
    return Room(parameters, {gpu_tensor.ADDRESS: invitation}, token)

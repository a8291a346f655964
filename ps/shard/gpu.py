"""`--device`: which GPU a shard keeps its parameters on."""

from __future__ import annotations

import logging
import secrets
from typing import NamedTuple

import torch

from hubring.ps.core.errors import ConfigError
from hubring.ps.store import gpu_tensor
from hubring.ps.store.parameter_memory import GpuMemory
from hubring.ps.transport.cuda_ipc import CudaMemory, gpu_name

log = logging.getLogger(__name__)


class Room(NamedTuple):
    """A shard's parameters on a GPU, and what tells workers of it.

    Attributes:
        parameters: For its store.
        addresses: What tells workers of it, beside the shard's other addresses.
        token: Lies where that says; to be held as long as the shard lives.
    """

    parameters: GpuMemory
    addresses: dict[str, str]
    token: torch.Tensor


def find(name: str) -> torch.device:
    """The GPU that `cuda` or `cuda:N` names.

    Raises:
        ConfigError: It is not here.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(name.partition(":")[2] or 0)
    if count == 0:
        built = "" if torch.version.cuda else ", which was installed without CUDA"
        raise ConfigError(
            f"--device {name}: torch{built} finds no GPU here; take --device cpu, or ask ps-server doctor why"
        )
    if index >= count:
        last = f"cuda:0 to cuda:{count - 1}" if count > 1 else "cuda:0"
        raise ConfigError(f"--device {name}: torch finds {count} GPU(s) here, {last}; take one of these")
    return torch.device("cuda", index)


def room(name: str) -> Room:
    """Makes room for parameters on this GPU, which becomes the process's current one.

    Raises:
        ConfigError: It is not here.
    """
    device = find(name)
    torch.cuda.set_device(device)
    memory = CudaMemory(device)
    token = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8).to(device)
    parameters = GpuMemory(device, memory)
    try:
        invitation = gpu_tensor.invitation(gpu_name(device), memory, token)
    except ConfigError as error:
        log.warning("workers on this GPU go through host memory: %s", error)
        return Room(parameters, {}, token)
    return Room(parameters, {gpu_tensor.ADDRESS: invitation}, token)

"""Process groups over NCCL."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from hubring.ps.core.errors import ConfigError, DeadlineExceeded, RingBroken
from hubring.ps.core.work import Work


def open_nccl(rank: int, size: int, store: Store, device: torch.device, timeout: float) -> Any:
    """Opens a group that connects in its first operation.

    Raises:
        ConfigError: torch has no NCCL, or the device is no GPU.
    """
    if not dist.is_nccl_available():
        raise ConfigError("backend nccl: this torch was built without NCCL; use gloo")
    if device.type != "cuda":
        raise ConfigError(f"backend nccl needs a GPU, but the device is {device}; use gloo")
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def connect(group: Any, store: Store, device: torch.device, timeout: float, watch: Work) -> None:
    """Connects a group. NCCL itself waits without limit for a member that is lost.

    Args:
        group: The group.
        store: Its store, which must live as long as NCCL uses it.
        device: The GPU.
        timeout: Seconds.
        watch: Fails when a member is lost.

    Raises:
        RingBroken: NCCL has failed, or a member is lost.
        DeadlineExceeded: A member did not connect in time.
    """
    connected = Work("connecting over NCCL")
    watch.when_done(lambda ended: connected.fail(ended.error) if ended.error is not None else None)

    def first_operation(_: Store) -> None:
        torch.cuda.set_device(device)
        try:
            group.allreduce([torch.zeros(1, device=device)]).wait()  # torch does not keep the tensor
        except RuntimeError as cause:
            connected.fail(RingBroken(str(cause)))
        else:
            connected.complete_part()
        if connected.error is not None:  # the caller has given up
            group.abort()

    threading.Thread(target=first_operation, args=(store,), name="connecting over NCCL", daemon=True).start()
    try:
        connected.wait(timeout)
    except DeadlineExceeded as error:
        connected.fail(error)
        if connected.error is not None:  # otherwise it has connected just now
            raise

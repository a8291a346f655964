"""Exchange of buckets on the GPU of the hub's store: messages carry GPU addresses, not tensors.

    push     when backward's gradients are complete, a waiting thread sends their address
    answer   has the address of the values, and the event after the shard's step
    copy in  waits for that event on the GPU and copies the values into the model

It works in mode bsp only. There a shard does not change the values of an answer before the
worker's next push. The worker pushes after all work that it queued before is done, including
the copy in. The worker does not change the gradients before the shard's event, which is after
the last kernel that reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hubring.ps.client.client import KVClient
from hubring.ps.compression import gpu_tensor
from hubring.ps.compression.gpu_tensor import MAX_BYTES, CudaMemory, Reached, gpu_name
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import Coded
from hubring.ps.core.types import HyperTable, Slice, StepHyper
from hubring.ps.core.work import Work
from hubring.ps.job.sharding import ParameterPart, parameter_parts
from hubring.ps.transport.registry import ShardAddress
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.staging import Allocate, Lands, ThroughHost
from hubring.workers.communicators.slice_exchange import Absence, of_slice

log = logging.getLogger(__name__)


class _PlacedSlice(NamedTuple):
    """One slice: the address of its gradient, the host memory of its answer, and the target of the values."""

    piece: Slice
    parts: Sequence[ParameterPart]
    gradient: Coded
    landing: Tensor
    target: Tensor


class PlacedBucket:
    """One bucket's exchange by GPU addresses.

    Args:
        bucket: A bucket on the GPU.
        slices: The bucket's slices.
        lands: The kind of answer.
        memory: The GPU's memory, shared with the shards.
        reached: The shards' memory that is open in this process.
        allocate: Makes host memory that the transport sends fast, for the messages' payloads.
    """

    def __init__(
        self,
        bucket: Bucket,
        slices: Sequence[Slice],
        lands: Lands,
        memory: CudaMemory,
        reached: Reached,
        allocate: Allocate,
    ) -> None:
        assert isinstance(bucket.stage, ThroughHost)
        self._stage = bucket.stage
        self._memory = memory
        self._reached = reached
        whole = memory.share(bucket.gradients)
        target = bucket.landing if lands == "values" else bucket.gradients
        self._slices = []
        for piece in slices:
            parts = parameter_parts(piece, bucket.spec.tensors)
            part = slice(piece.offset, piece.offset + piece.numel)
            code = gpu_tensor.encode(whole.part(piece.offset * bucket.gradients.element_size()))
            payload = allocate(code.numel(), torch.uint8).copy_(code)
            gradient = gpu_tensor.placed(payload, bucket.gradients[part])
            landing = allocate(MAX_BYTES, torch.uint8)
            self._slices.append(_PlacedSlice(piece, parts, gradient, landing, target[part]))

    def push_pull(
        self, what: str, client: KVClient, hyper: StepHyper, absent: Absence | None, weight: float | None
    ) -> Work:
        """Starts the exchange. When the work is done, call `Bucket.arrive`."""
        return self._stage.in_place(what, lambda: self._start(what, client, hyper, absent, weight))

    def _start(
        self, what: str, client: KVClient, hyper: StepHyper, absent: Absence | None, weight: float | None
    ) -> Work:
        work = Work(what, len(self._slices))
        with client.batched():
            for own in self._slices:
                lacks = () if absent is None else absent.in_slice(own.parts)
                client.push_pull(
                    own.piece.shard,
                    client.prepare(own.piece.key, own.gradient, own.landing),
                    of_slice(hyper, own.parts) if isinstance(hyper, HyperTable) else hyper,
                    work,
                    partial(self._copy_in, own.target),
                    lacks,
                    None if absent is None else absent.on_reply(own.parts, lacks),
                    weight=weight,
                )
        return work

    def _copy_in(self, target: Tensor, answer: Coded) -> None:
        """Queues the copy of an answer's values."""
        values, place = self._reached.tensor(answer)
        self._stage.device.copy_in(values, target, self._memory.mark(place.ready))


def own_gpu(device: torch.device) -> tuple[str, CudaMemory]:
    """Returns the unique name of the device's GPU, and its memory."""
    return gpu_name(device), CudaMemory(device)


def shared_memory(shards: Sequence[ShardAddress], buckets: Sequence[Bucket], mode: str) -> CudaMemory | None:
    """Returns the GPU memory that holds all shards and buckets; otherwise logs the reason and returns None.

    Args:
        shards: Addresses of all shards.
        buckets: All buckets of the model.
        mode: The hub's mode.
    """
    invitations = [
        shard.addresses[gpu_tensor.ADDRESS] for shard in shards if gpu_tensor.ADDRESS in shard.addresses
    ]
    if not invitations:
        return None  # a hub on the CPU, the usual case: log nothing
    try:
        memory = _accepted(invitations, len(shards), buckets, mode)
    except ConfigError as error:
        log.info("the hub's store is on a GPU, but exchange uses host memory: %s", error)
        return None
    log.info("exchange stays on the GPU: the hub's store is on the same GPU as the model")
    return memory


def _accepted(invitations: list[str], shards: int, buckets: Sequence[Bucket], mode: str) -> CudaMemory:
    devices = {bucket.values.device for bucket in buckets}
    if len(invitations) < shards:
        raise ConfigError(f"only {len(invitations)} of {shards} shards are on a GPU")
    if len(devices) != 1 or not all(isinstance(bucket.stage, ThroughHost) for bucket in buckets):
        raise ConfigError(f"the model is on {', '.join(sorted(map(str, devices)))}")
    if mode != "bsp":
        raise ConfigError(f"in mode {mode} values can change while they are read; use mode bsp")
    name, memory = own_gpu(devices.pop())
    for invitation in invitations:
        gpu_tensor.accept(invitation, name, memory)
    return memory

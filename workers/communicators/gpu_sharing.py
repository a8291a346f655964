"""Buckets whose store is on their own GPU: messages name places, and only the GPU moves numbers.

    push     once backward's gradients are whole, a thread that waits for it names their place
    answer   names the values' place, and the event behind the shard's step
    copy in  waits for that event on the GPU, and copies the values into the model

It is so in bsp alone, where a shard leaves the values of an answer as they are
until the worker has pushed again. It pushes again when all that it had queued is
done, the copy included; and nothing here touches the gradients before the
shard's event, which lies behind the last kernel that read them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from hubring.ps.client.client import KVClient
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import Coded
from hubring.ps.core.types import Hyper, Slice
from hubring.ps.core.work import Work
from hubring.ps.store import gpu_tensor
from hubring.ps.store.gpu_tensor import MAX_BYTES, Reached, SharedMemory
from hubring.ps.transport.cuda_ipc import CudaMemory, gpu_name
from hubring.ps.transport.registry import ShardAddress
from hubring.workers.buckets.bucketing import Bucket
from hubring.workers.buckets.device_copies import Device
from hubring.workers.buckets.pinning import Allocate
from hubring.workers.buckets.staging import Lands, ThroughHost

log = logging.getLogger(__name__)


class _PlacedSlice:
    """One slice: what is said of its gradient, and where its answer goes."""

    def __init__(
        self, piece: Slice, gradient: Coded, target: Tensor, landing: Tensor, device: Device, reached: Reached
    ) -> None:
        self.piece = piece
        self.gradient = gradient
        self.landing = landing
        self._target = target
        self._device = device
        self._reached = reached

    def show(self, answer: Coded, memory: SharedMemory) -> None:
        """Queues the copy of what the answer names."""
        values, place = self._reached.tensor(answer)
        self._device.copy_in(values, self._target, memory.mark(place.ready))


class PlacedBucket:
    """One bucket's exchange by places.

    Args:
        bucket: On the GPU.
        slices: Of the bucket.
        lands: What the answer is.
        memory: The GPU's, which the shards share.
        reached: What is open of theirs.
        allocate: Makes host memory that travels at its best; the messages' payloads lie there.
    """

    def __init__(
        self,
        bucket: Bucket,
        slices: Sequence[Slice],
        lands: Lands,
        memory: SharedMemory,
        reached: Reached,
        allocate: Allocate,
    ) -> None:
        assert isinstance(bucket.stage, ThroughHost)
        self._stage = bucket.stage
        self._memory = memory
        whole = memory.share(bucket.gradients)
        target = bucket.values if lands == "values" else bucket.gradients
        self._slices = []
        for piece in slices:
            part = slice(piece.offset, piece.offset + piece.numel)
            code = gpu_tensor.encode(whole.part(piece.offset * bucket.gradients.element_size()))
            payload = allocate(code.numel(), torch.uint8).copy_(code)
            gradient = gpu_tensor.placed(payload, bucket.gradients[part])
            landing = allocate(MAX_BYTES, torch.uint8)
            own = _PlacedSlice(piece, gradient, target[part], landing, bucket.stage.device, reached)
            self._slices.append(own)

    def push_pull(self, what: str, client: KVClient, hyper: Hyper) -> Work:
        """Done when the answer is on its way into the model: then the stage may `arrive`."""
        return self._stage.in_place(what, lambda: self._start(what, client, hyper))

    def _start(self, what: str, client: KVClient, hyper: Hyper) -> Work:
        work = Work(what, len(self._slices))
        with client.batched():
            for own in self._slices:
                client.push_pull(
                    own.piece.shard,
                    own.piece.key,
                    own.gradient,
                    own.landing,
                    hyper,
                    work,
                    lambda answer, own=own: own.show(answer, self._memory),  # type: ignore[misc]
                )
        return work


def own_gpu(device: torch.device) -> tuple[str, SharedMemory]:
    """A device's GPU by its own name, and its memory."""
    return gpu_name(device), CudaMemory(device)


def shared_memory(
    shards: Sequence[ShardAddress], buckets: Sequence[Bucket], mode: str
) -> SharedMemory | None:
    """The GPU's memory that all shards and all buckets lie in; None, and the log says why, if they do not.

    Args:
        shards: Where each of them is.
        buckets: All of the model's.
        mode: The hub's.
    """
    invitations = [
        shard.addresses[gpu_tensor.ADDRESS] for shard in shards if gpu_tensor.ADDRESS in shard.addresses
    ]
    if not invitations:
        return None  # the usual hub, on the CPU: nothing worth a line
    try:
        memory = _accepted(invitations, len(shards), buckets, mode)
    except ConfigError as error:
        log.info("the hub's store is on a GPU, but gradients go there through host memory: %s", error)
        return None
    log.info("gradients and parameters stay on the GPU, where the hub's store is too")
    return memory


def _accepted(invitations: list[str], shards: int, buckets: Sequence[Bucket], mode: str) -> SharedMemory:
    devices = {bucket.values.device for bucket in buckets}
    if len(invitations) < shards:
        raise ConfigError(f"only {len(invitations)} of {shards} shards keep their part on a GPU")
    if len(devices) != 1 or not all(isinstance(bucket.stage, ThroughHost) for bucket in buckets):
        raise ConfigError(f"the model is on {', '.join(sorted(map(str, devices)))}")
    if mode != "bsp":
        raise ConfigError(f"in mode {mode} values may change while they are read")
    name, memory = own_gpu(devices.pop())
    for invitation in invitations:
        gpu_tensor.accept(invitation, name, memory)
    return memory

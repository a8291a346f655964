"""A communication hook of DistributedDataParallel that sends gradients compressed, over any backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from hubring.ps.compression.compressor import ErrorFeedback, by_name, codec_for, mean_into
from hubring.ps.core.errors import UsageError
from hubring.ps.core.messages import Coded

Hook = Callable[[Any, Any], Future[Tensor]]
"""Takes a state and a `GradBucket`."""


def ddp_hook(codec: str, group: dist.ProcessGroup | None = None) -> Hook:
    """Returns a hook for `DistributedDataParallel.register_comm_hook`, with a codec of Hubring.

        model = DistributedDataParallel(model)
        model.register_comm_hook(None, hubring.ddp_hook("int8"))

    Each rank sends its encoded gradients to all others, which decode and average them, so all ranks have the
    same bits. What a codec omits is added to the gradients of the next step. The codecs run on the CPU. Use
    one hook for one model.

    Args:
        codec: bf16, fp16, int8, sign, or topk:FRACTION as in topk:0.01.
        group: The model's process group; None for the default one.

    Raises:
        ConfigError: The codec is unknown.
        UsageError: The codec is powersgd.
    """
    if codec.startswith("powersgd"):
        raise UsageError(
            f"ddp_hook({codec!r}): use torch's own hook, powerSGD_hook, or one of the other codecs"
        )
    by_name(codec)
    feedback: dict[tuple[int, int], ErrorFeedback] = {}

    def hook(_: Any, bucket: Any) -> Future[Tensor]:
        buffer: Tensor = bucket.buffer()
        size, numel = dist.get_world_size(group), buffer.numel()
        compressor = codec_for(codec, numel, buffer.dtype)
        if compressor is None:  # it would not get shorter
            buffer.div_(size)
            work = dist.all_reduce(buffer, group=group, async_op=True)
            assert work is not None, "DDP runs on the group's members only"
            reduced: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
            return reduced
        # DDP makes its buckets again after the first step, with other lengths.
        own = feedback.setdefault((bucket.index(), numel), ErrorFeedback(compressor, numel, buffer.dtype))
        payload = torch.empty(compressor.nbytes(numel), dtype=torch.uint8, device="cpu")
        own.encode(buffer.cpu(), payload)
        every = torch.empty((size, payload.numel()), dtype=torch.uint8, device=buffer.device)
        work = dist.all_gather_into_tensor(every.view(-1), payload.to(buffer.device), group, async_op=True)
        assert work is not None, "DDP runs on the group's members only"

        def decode(done: Future[Any]) -> Tensor:
            done.value()  # raises an error of the exchange
            parts = [Coded(codec, one, numel, buffer.dtype) for one in every.cpu()]
            mean = torch.empty(numel, dtype=buffer.dtype, device="cpu")
            mean_into(mean, compressor, parts, torch.empty_like(mean))
            buffer.copy_(mean)
            return buffer

        decoded: Future[Tensor] = work.get_future().then(decode)
        return decoded

    hook.__annotations__.clear()  # DDP accepts only classes here, and these are strings
    return hook

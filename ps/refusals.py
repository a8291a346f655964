"""Why a shard cannot serve a request: each names the value, what was allowed, and the mend."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ps.entry import Entry
from ps.errors import ConfigError
from ps.messages import Code, Coded, Push, Refusal
from ps.placement import is_placed
from ps.types import Sender

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def fenced(sender: Sender, epoch: int) -> Refusal:
    """The sender is not in the view."""
    text = (
        f"rank {sender.rank} (incarnation {sender.incarnation}) takes no part as of epoch {epoch}:"
        " its lease ran out, or it has left. Start the worker again to rejoin"
    )
    return Refusal(Code.FENCED, text)


def unknown_key(key: int, held: Collection[int]) -> Refusal:
    """The key is on another shard, or nowhere."""
    here = f"{len(held)} keys from {min(held)} to {max(held)}" if held else "no keys yet"
    text = f"key {key} is not on this shard, which holds {here}; ask the coordinator for the plan"
    return Refusal(Code.UNKNOWN_KEY, text)


def out_of_order(push: Push, expected: int) -> Refusal:
    """The push is not the sender's next one, or comes before the last one was answered."""
    text = (
        f"rank {push.sender.rank} pushed key {push.key} at clock {push.clock}, expected was {expected} once"
        " the push before is answered; wait for each answer and use the clock that it brings"
    )
    return Refusal(Code.OUT_OF_ORDER, text)


def misfit(entry: Entry, tensor: Tensor) -> Refusal | None:
    """The tensor is of another size or dtype than the key; None if it fits."""
    held = entry.values
    if tensor.shape == held.shape and tensor.dtype == held.dtype:
        return None
    return _wrong_size(entry, _spell(tensor))


def misfitting(entry: Entry, gradient: Tensor | Coded) -> Refusal | None:
    """The gradient is of another size, dtype or codec than the key's; None if it fits."""
    due = entry.codec.name if entry.codec else ""
    codec = gradient.codec if isinstance(gradient, Coded) else ""
    if codec != due and not (entry.shown and is_placed(gradient)):
        text = (
            f"key {entry.key} takes gradients {f'in {due}' if due else 'as they are'}, what came is"
            f" {f'in {codec}' if codec else 'uncompressed'}; start all workers with the same --compress"
        )
        return Refusal(Code.WRONG_SIZE, text)
    if not isinstance(gradient, Coded):
        return misfit(entry, gradient)
    if (gradient.numel,) == entry.values.shape and gradient.dtype == entry.values.dtype:
        return None
    return _wrong_size(entry, f"{_dtype(gradient.dtype)}[{gradient.numel}] in {codec}")


def unusable(entry: Entry, push: Push) -> Refusal | None:
    """There is nothing to update yet, or the optimizer cannot use the hyperparameters."""
    if not entry.initialised:
        text = f"key {entry.key} has no values to update yet; rank 0 gives them, the others pull them first"
        return Refusal(Code.BAD_REQUEST, text)
    try:
        entry.optimizer.check(push.hyper)
    except ConfigError as error:
        return Refusal(Code.BAD_REQUEST, f"rank {push.sender.rank}: {error}")
    return None


def orphaned(key: int) -> Refusal:
    """Nobody is left who could bring the key's first values."""
    text = (
        f"rank 0 left the job before it had given key {key} its first values;"
        " see why it failed, then start the job again"
    )
    return Refusal(Code.JOB_FAILED, text)


def _wrong_size(entry: Entry, came: str) -> Refusal:
    text = (
        f"key {entry.key} holds {_spell(entry.values)}, what came is {came};"
        " start all workers with the same model and --bucket-bytes"
    )
    return Refusal(Code.WRONG_SIZE, text)


def _spell(tensor: Tensor) -> str:
    return f"{_dtype(tensor.dtype)}{list(tensor.shape)}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

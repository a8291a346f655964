"""Why a shard cannot serve a request: each names the value, what was allowed, and the mend."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from hubring.ps.core.errors import ConfigError, NonFinite
from hubring.ps.core.messages import Code, Coded, Init, Pull, Push, Refusal
from hubring.ps.core.types import Sender
from hubring.ps.store.gpu_tensor import is_placed
from hubring.ps.store.key_state import Contribution, Entry

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


def unfit(entries: Mapping[int, Entry], request: Push | Pull | Init) -> Refusal | None:
    """The key is elsewhere, or what came does not fit it; None where nothing is wrong with it."""
    entry = entries.get(request.key)
    if entry is None:
        return unknown_key(request.key, entries)
    if isinstance(request, Push):
        return misfitting(entry, request.gradient) or unusable(entry, request)
    return misfit(entry, request.values) if isinstance(request, Init) else None


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


def not_finite(entry: Entry, scratch: Tensor) -> Refusal:
    """The open round's gradients, or their sum, hold what is no finite number.

    Args:
        entry: Whose round could not close.
        scratch: At least as long as its values, and of their dtype.
    """
    text = _worst(entry, scratch)
    if entry.codec is not None and entry.codec.name == "fp16":
        text += " (--compress fp16 ends at 65504, and bf16 where float32 does)"
    return Refusal(Code.NOT_FINITE, f"{text}; {NonFinite.mend}")


def unsound(entry: Entry, values: Tensor) -> str:
    """What is not finite in a copy of the key's values, of which something is, as a clause."""
    index = int((~values.isfinite()).nonzero()[0])
    return f"{_parameter(entry, index)} holds {values[index].item()}"


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


def _worst(entry: Entry, scratch: Tensor) -> str:
    """Whose gradient is not finite, in which step and parameter; the lowest rank's, if there are several."""
    ranks = sorted(entry.contributions)
    step = entry.contributions[ranks[0]].push.clock + 1
    for rank in ranks:
        contribution = entry.contributions[rank]
        gradient = _decoded(entry, contribution, scratch)
        found = (~gradient.isfinite()).nonzero()
        if len(found):
            index = int(found[0])
            return (
                f"the gradient of rank {rank} is not finite in step {contribution.push.clock + 1}:"
                f" {gradient[index].item()} in {_parameter(entry, index)}, one of {len(found)} such elements"
            )
    return (
        f"the gradients of ranks {', '.join(map(str, ranks))} are finite in step {step}, but their sum is"
        f" beyond {_dtype(entry.values.dtype)}, in {_parameter(entry, 0)} or behind it"
    )


def _decoded(entry: Entry, contribution: Contribution, scratch: Tensor) -> Tensor:
    gradient = contribution.gradient
    if not isinstance(gradient, Coded):
        return gradient
    assert entry.codec is not None, f"key {entry.key} took a gradient in another form"
    decoded = scratch[: entry.values.numel()]
    entry.codec.decode(gradient.payload, decoded)
    return decoded


def _parameter(entry: Entry, index: int) -> str:
    tensor = entry.parameter_at(index)
    return f"{tensor.name} {list(tensor.shape)}"


def _spell(tensor: Tensor) -> str:
    return f"{_dtype(tensor.dtype)}{list(tensor.shape)}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

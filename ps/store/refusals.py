"""The refusals of a shard: each names the value, what was expected, and the fix."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from typing import TYPE_CHECKING

from hubring.ps.compression.gpu_tensor import is_placed
from hubring.ps.core.errors import ConfigError, NonFinite
from hubring.ps.core.messages import (
    Code,
    Coded,
    Contribute,
    Init,
    Push,
    Refusal,
    Request,
    Write,
    WriteParameters,
    WriteState,
)
from hubring.ps.core.optimizer_state import STEP, OptimizerState
from hubring.ps.core.types import MAX_WORLD_SIZE, HyperTable, Sender, TensorSpec
from hubring.ps.store.consistency import Consistency
from hubring.ps.store.key_state import Contribution, KeyEntry
from hubring.ps.store.script_changes import Disagreement

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def fenced(sender: Sender, epoch: int) -> Refusal:
    """The sender is not in the view."""
    text = (
        f"rank {sender.rank} (join {sender.number}) is not a member at epoch {epoch}:"
        " its lease expired, or it left the job. Restart the worker to rejoin"
    )
    return Refusal(Code.FENCED, text)


def unknown_key(key: int, held: Collection[int]) -> Refusal:
    """The key is on another shard, or does not exist."""
    here = f"{len(held)} keys from {min(held)} to {max(held)}" if held else "no keys yet"
    text = f"key {key} is not on this shard, which holds {here}; ask the coordinator for the plan"
    return Refusal(Code.UNKNOWN_KEY, text)


def unfit(entries: Mapping[int, KeyEntry], request: Request) -> Refusal | None:
    """Checks that this shard holds the key and that the request fits it; returns None if so."""
    if isinstance(request, Contribute):
        return None
    entry = entries.get(request.key)
    if entry is None:
        return unknown_key(request.key, entries)
    match request:
        case Push():
            return _unfit_push(entry, request)
        case Init():
            # The state of a later Init is ignored with it.
            state = None if entry.initialised or request.state is None else request.state
            refusal = None if state is None else misfitting_state(entry, request.sender, state)
            return refusal or misfit(entry, request.values)
        case WriteParameters():
            return unwritable(entry, request) or misfit(entry, request.values)
        case WriteState():
            return unwritable(entry, request) or misfitting_state(entry, request.sender, request.state)
    return None


def _unfit_push(entry: KeyEntry, push: Push) -> Refusal | None:
    """Checks a gradient's form and size, the parameters without one, and the hyperparameters."""
    if entry.codec is not None or isinstance(push.gradient, Coded):
        refusal = _unfit_code(entry, push.gradient)
    else:
        refusal = misfit(entry, push.gradient)
    if refusal is None and push.absent and push.absent[-1] >= len(entry.parts):
        refusal = _misplaced(entry, push)
    if refusal is None and not entry.initialised:
        refusal = _no_values(entry)
    if refusal is None and push.weight is not None and not 0 <= push.weight < inf:
        refusal = Refusal(Code.BAD_REQUEST, f"rank {push.sender.rank} sent a weight of {push.weight}")
    if refusal is None and push.hyper != entry.optimizer.checked:
        try:
            entry.optimizer.check(push.hyper)
        except ConfigError as error:
            refusal = Refusal(Code.BAD_REQUEST, f"rank {push.sender.rank}: {error}")
    return refusal


def unwritable(entry: KeyEntry, write: Write) -> Refusal | None:
    """The hub does not hold what the script changed."""
    what = "parameters" if isinstance(write, WriteParameters) else "optimizer state"
    if entry.averages and not (entry.coded is not None and isinstance(write, WriteState)):
        text = (
            f"rank {write.sender.rank} sent {what} for key {entry.key}, but with --aggregate the workers hold"
            " them; run the same Hubring version on the server and all workers"
        )
        return Refusal(Code.BAD_REQUEST, text)
    return None if entry.initialised else _no_values(entry)


def misfitting_state(entry: KeyEntry, sender: Sender, state: OptimizerState) -> Refusal | None:
    """The optimizer's state does not fit the key; None if it fits."""
    text = entry.misfit(state)
    if not text:
        return None
    name = entry.parameter_at(0).name
    return Refusal(
        Code.BAD_REQUEST,
        f"rank {sender.rank} loaded an optimizer state that does not fit {name}: {text}."
        " Load a state of the same optimizer and model",
    )


def crowded(entry: KeyEntry, sender: Sender, live: int) -> Refusal:
    """A worker of an asynchronous hub wrote parameters while other workers are live."""
    text = (
        f"rank {sender.rank} changed {_parameter(entry, 0)}, or a parameter beside it, between two steps."
        f" Several workers of an asynchronous hub ({live} now) cannot change parameters between steps:"
        " use --mode bsp or --aggregate, or change them on one rank before training"
    )
    return Refusal(Code.BAD_REQUEST, text)


def unpaired(entry: KeyEntry, finished: str) -> Refusal | None:
    """Returns why the gradients of a round must not be averaged: they are not those of all ranks' one step.

    `finished` is `View.finished`.
    """
    if finished:
        return Refusal(Code.MISMATCH, finished)
    steps = {
        rank: one.push.hyper.get("step")
        for rank, one in sorted(entry.contributions.items())
        if not isinstance(one.push.hyper, HyperTable)  # none is, as no options count here
    }
    (first, step), *others = steps.items()
    for rank, other in others:
        if other != step and step is not None and other is not None:
            text = (
                f"rank {first} sent its gradient of {_parameter(entry, 0)} after {step:g} steps, and rank"
                f" {rank} after {other:g}: some rank ran backward more often than the others. Run backward"
                " equally often on all ranks, and compute a gradient that only one rank needs with"
                " torch.autograd.grad"
            )
            return Refusal(Code.MISMATCH, text)
    return None


def disagreeing(entry: KeyEntry, found: Disagreement) -> Refusal:
    """Ranks changed parameters or state differently before one step."""
    one, other = found.ranks
    step = entry.version + 1
    if found.index is None:
        what, where = "optimizer state", _parameter(entry, 0)
    elif found.tensor == STEP:
        part = entry.parts[found.index]
        what, where = "optimizer state (step)", _spelled(entry.tensors[part.position])
    else:
        what = f"optimizer state ({found.tensor})" if found.tensor else "parameters"
        where = _parameter(entry, found.index)
    text = (
        f"ranks {one} and {other} have different {what} before step {step}: {where} differs."
        " Make the same change on every rank between the same two steps"
    )
    return Refusal(Code.MISMATCH, text)


def out_of_order(push: Push | Write, expected: int) -> Refusal:
    """The push or write is not the sender's next one, or arrives before the reply to the previous push."""
    text = (
        f"rank {push.sender.rank} sent key {push.key} at clock {push.clock}, expected clock {expected}"
        " after the reply to the previous push; wait for each reply and use its clock"
    )
    return Refusal(Code.OUT_OF_ORDER, text)


def uncoverable(entry: KeyEntry, push: Push, consistency: Consistency) -> Refusal | None:
    """The push cannot count for the workers that it covers; None if it can."""
    own, ranks = push.sender.rank, [covered.rank for covered in push.covers]
    taken = {rank for rank, one in entry.covered.items() if one.push.sender.rank != own}
    taken |= {rank for rank, one in entry.contributions.items() if one.push.covers} - {own}
    if not consistency.stable:
        why = "only --mode bsp accepts such sums; start the workers without --local"
    elif len({own, *ranks}) <= len(ranks) or max(ranks) >= MAX_WORLD_SIZE:
        why = f"expected other ranks below {MAX_WORLD_SIZE}, each once"
    elif taken.intersection((own, *ranks)):
        why = "another push of this step has some of them already; restart the job without --local"
    else:
        return None
    told = f"rank {own} sent the gradients of ranks {ranks} for key {entry.key} in a sum with its own"
    return Refusal(Code.BAD_REQUEST, f"{told}: {why}")


def misfit(entry: KeyEntry, tensor: Tensor) -> Refusal | None:
    """The tensor has another size or dtype than the key; None if it fits."""
    held = entry.values
    if tensor.shape == held.shape and tensor.dtype == held.dtype:
        return None
    return _wrong_size(entry, _spell(tensor))


def _unfit_code(entry: KeyEntry, gradient: Tensor | Coded) -> Refusal | None:
    """The gradient has another codec, size or dtype than the key; None if it fits."""
    due = entry.codec.name if entry.codec else ""
    codec = gradient.codec if isinstance(gradient, Coded) else ""
    if codec != due and not (entry.shown and is_placed(gradient)):
        text = (
            f"key {entry.key} expects {f'gradients in {due}' if due else 'uncompressed gradients'}, got"
            f" {f'a gradient in {codec}' if codec else 'an uncompressed gradient'};"
            " start all workers with the same --compress"
        )
        return Refusal(Code.WRONG_SIZE, text)
    if not isinstance(gradient, Coded):
        return misfit(entry, gradient)
    if (gradient.numel,) == entry.values.shape and gradient.dtype == entry.values.dtype:
        return None
    return _wrong_size(entry, f"{_dtype(gradient.dtype)}[{gradient.numel}] in {codec}")


def _misplaced(entry: KeyEntry, push: Push) -> Refusal:
    """The push is without a gradient for a parameter that the slice does not have."""
    text = (
        f"rank {push.sender.rank} sent key {entry.key} without a gradient for parameter {push.absent[-1]} of"
        f" the slice, which has {len(entry.parts)}; start all workers with the same model and --bucket-bytes"
    )
    return Refusal(Code.BAD_REQUEST, text)


def not_finite(entry: KeyEntry, scratch: Tensor) -> Refusal:
    """The gradients of the open round, or their sum, have a NaN or an infinity.

    Args:
        entry: The key whose round cannot close.
        scratch: At least as long as the values, with the dtype of their sum.
    """
    text = _first_not_finite(entry, scratch)
    if entry.codec is not None and entry.codec.name == "fp16":
        text += " (--compress fp16 has values up to 65504; --compress bf16 has the range of float32)"
    return Refusal(Code.NOT_FINITE, f"{text}; {NonFinite.fix}")


def unsound(entry: KeyEntry, values: Tensor) -> str:
    """Returns the first element that is not finite in a copy of the key's values, as a clause."""
    index = int((~values.isfinite()).nonzero()[0])
    return f"{_parameter(entry, index)} holds {values[index].item()}"


def orphaned(key: int) -> Refusal:
    """Rank 0 is lost, so no worker can send the key's initial values."""
    text = (
        f"rank 0 left the job before it sent the initial values of key {key};"
        " check the log of rank 0, then restart the job"
    )
    return Refusal(Code.JOB_FAILED, text)


def _no_values(entry: KeyEntry) -> Refusal:
    text = f"key {entry.key} has no values yet; rank 0 must send them, then other ranks must pull them"
    return Refusal(Code.BAD_REQUEST, text)


def _wrong_size(entry: KeyEntry, came: str) -> Refusal:
    text = (
        f"key {entry.key} expects {_spell(entry.values)}, got {came};"
        " start all workers with the same model and --bucket-bytes"
    )
    return Refusal(Code.WRONG_SIZE, text)


def _first_not_finite(entry: KeyEntry, scratch: Tensor) -> str:
    """Returns rank, step and parameter of the first gradient that is not finite, in rank order."""
    ranks = sorted(entry.contributions.keys() - entry.covered.keys())
    step = entry.contributions[ranks[0]].push.clock + 1
    for rank in ranks:
        contribution = entry.contributions[rank]
        gradient = _decoded(entry, contribution, scratch)
        found = (~gradient.isfinite()).nonzero()
        if len(found):
            index = int(found[0])
            covers = ", ".join(str(covered.rank) for covered in contribution.push.covers)
            others = f", summed with those of ranks {covers}," if covers else ""
            return (
                f"the gradient of rank {rank}{others} is not finite in step {contribution.push.clock + 1}:"
                f" {gradient[index].item()} in {_parameter(entry, index)}, one of {len(found)} such elements"
            )
    return (
        f"the gradients of ranks {', '.join(map(str, ranks))} are finite in step {step}, but their sum"
        f" overflows {_dtype(scratch.dtype)} in {_parameter(entry, 0)} or a later parameter"
    )


def _decoded(entry: KeyEntry, contribution: Contribution, scratch: Tensor) -> Tensor:
    gradient = contribution.gradient
    if not isinstance(gradient, Coded):
        return gradient
    assert entry.codec is not None, f"key {entry.key} has a gradient in another form"
    decoded = scratch[: entry.values.numel()]
    entry.codec.decode(gradient.payload, decoded)
    return decoded


def _parameter(entry: KeyEntry, index: int) -> str:
    return _spelled(entry.parameter_at(index))


def _spelled(tensor: TensorSpec) -> str:
    return f"{tensor.name} {list(tensor.shape)}"


def _spell(tensor: Tensor) -> str:
    return f"{_dtype(tensor.dtype)}{list(tensor.shape)}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

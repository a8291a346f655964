"""Which samples a model trains on: one hash of each, so that it does not matter how a batch is divided.

A batch counts once backward reaches what the model made of it, so evaluation never does. A sample is a row of
the model's inputs, with the row of the labels that the loss keeps for backward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.data import DistributedSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hubring.ps.core.torch_internals import is_functorch_tensor, is_traced, no_dense_tensor
from hubring.workers.audit.sample import counted
from hubring.workers.buckets.value_memory import BITS

MOST_OF_ROW = 256
"""Most elements of one row of a tensor that are hashed, evenly spread."""

NODES = 16
"""How many functions of a loss are searched for its labels."""

Epoch = tuple[int, ...]
"""Number of the DataLoader's pass in this process; and of a sampler that shards: the epoch that was set,
whether it shuffles, its shard, the number of shards, and the samples of the data set."""


class SampleTap:
    """Records the samples of a model's steps. Use it in the thread that trains.

    Args:
        model: The model.

    Attributes:
        seconds: What recording has cost so far.
        evaluations: Forwards without gradients so far.
        labels: Of the loss whose backward runs.
        thread: The thread that trains.
    """

    def __init__(self, model: Module) -> None:
        self.seconds, self.evaluations = 0.0, 0
        self.labels: list[Tensor] = []
        self.thread = threading.get_ident()
        self._batches: list[list[Tensor]] = []
        self._handle = model.register_forward_hook(self, with_kwargs=True)
        _watch(self)

    def close(self) -> None:
        """Records no more."""
        self._handle.remove()
        _unwatch(self)

    def __call__(self, _: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """Hears of each forward of the model."""
        if is_traced():
            return
        if torch.is_grad_enabled():
            self._ran([*args, *kwargs.values()], output)
        else:
            self.evaluations += 1

    def __reduce__(self) -> tuple[Any, ...]:
        return _deaf, ()  # for the hook of a copied model, which this rank does not train

    @property
    def epoch(self) -> Epoch:
        """Where the last batch of a DataLoader came from; empty if there was none."""
        return tuple(getattr(_here, "epoch", ()))

    def take(self, *, evaluates: bool) -> bytes:
        """Returns a hash of each of this step's samples, in eight bytes, and begins the next step.

        Args:
            evaluates: Whether the optimizer may evaluate a batch several times. It then counts once.
        """
        found = [_hashes(each).tobytes() for each in self._batches]
        self._batches = []
        return b"".join(dict.fromkeys(found) if evaluates else found)

    @counted
    def begin_backward(self, loss: Tensor) -> None:
        """Looks for the labels of the samples that this backward reaches."""
        self.labels = list(_labels(loss))

    @counted
    def _ran(self, given: list[object], output: object) -> None:
        inputs = [one for one in _tensors(given) if one.dim()]
        made = [one for one in _tensors([output]) if one.grad_fn is not None]  # a parameter outlives the step
        if not inputs or not made:
            return
        batch = [_rows(one, len(inputs[0])) for one in inputs if len(one) == len(inputs[0])]
        alive = weakref.ref(self)  # the garbage collector cannot see torch's hooks

        def trained(_: Tensor) -> None:
            if batch and (tap := alive()) is not None:
                tap._trained(batch)

        for one in made:
            one.register_hook(trained)  # type: ignore[no-untyped-call]

    @counted
    def _trained(self, batch: list[Tensor]) -> None:
        rows = len(batch[0])
        labels = [_rows(one, rows) for one in self.labels if rows and one.numel() % rows == 0]
        self._batches.append([*batch, *labels])
        batch.clear()  # it counts once, whichever of its outputs backward reaches first


def _deaf() -> Any:
    return lambda *_: None


def _rows(tensor: Tensor, rows: int) -> Tensor:
    """Returns the bits of some elements of each row: an integer [rows, elements], on the same device."""
    own = tensor.detach()
    real = torch.view_as_real(own.resolve_conj()) if own.is_complex() else own
    flat = real.reshape(rows, real.numel() // rows) if rows else real.reshape(0, 1)
    chosen = flat[:, :: max(1, -(-flat.shape[1] // MOST_OF_ROW))]
    return chosen.clone(memory_format=torch.contiguous_format).view(BITS[chosen.element_size()])


_FACTOR = np.int64(-7046029254386353131)
"""An odd number of 64 random bits: 2**64 divided by the golden ratio."""

_FACTORS = np.random.default_rng(0).integers(1 << 62, size=MOST_OF_ROW) * 2 + 1


def _hashes(batch: list[Tensor]) -> np.ndarray[Any, np.dtype[np.int64]]:
    found = np.zeros(len(batch[0]), dtype=np.int64)
    for each in batch:
        bits = each.cpu().numpy().astype(np.int64)
        found = found * _FACTOR + (bits * _FACTORS[: bits.shape[1]]).sum(1)
    return (found ^ (found >> 32)) * _FACTOR  # so that sums of hashes are no hashes of sums


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """Yields the dense tensors."""
    for value in values:
        if isinstance(value, Tensor):
            if not is_functorch_tensor(value) and not no_dense_tensor(value):
                yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


# What torch has no hooks for: the labels of a loss, and which batch a DataLoader has given out.

_here = threading.local()
_taps: list[SampleTap] = []
_lock = threading.Lock()
_backward: Any = None
_next: Any = None


def _watch(tap: SampleTap) -> None:
    global _backward, _next
    with _lock:
        if not _taps:  # the script can have replaced them before
            _backward, _next = Tensor.backward, _BaseDataLoaderIter.__next__
            Tensor.backward = _noting_labels  # type: ignore[method-assign,assignment]
            _BaseDataLoaderIter.__next__ = _noting_epoch  # type: ignore[method-assign,assignment]
        _taps.append(tap)


def _unwatch(tap: SampleTap) -> None:
    with _lock:
        _taps[:] = [each for each in _taps if each is not tap]
        if not _taps:
            Tensor.backward = _backward  # type: ignore[method-assign]
            _BaseDataLoaderIter.__next__ = _next  # type: ignore[method-assign]


def _noting_labels(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
    taps = [tap for tap in _taps if tap.thread == threading.get_ident()]
    for tap in taps:
        tap.begin_backward(loss)
    try:
        return _backward(loss, *args, **kwargs)
    finally:
        for tap in taps:
            tap.labels = []


def _labels(loss: Tensor) -> Iterator[Tensor]:
    """Yields what the last functions of a loss keep as target, as `cross_entropy` and `mse_loss` do."""
    nodes = [] if loss.grad_fn is None else [loss.grad_fn]
    for node in nodes:
        try:
            yield from _tensors([getattr(node, "_saved_target", None)])
        except RuntimeError:  # it was changed in place, or freed by an earlier backward
            continue
        if len(nodes) < NODES:
            nodes += [one for one, _ in node.next_functions if one is not None and one not in nodes]


def _noting_epoch(iterator: Any) -> Any:
    batch = _next(iterator)
    if iterator._num_yielded == 1:
        _here.passes = getattr(_here, "passes", 0) + 1
        iterator.hubring_epoch = (_here.passes, *_shard(iterator._index_sampler))
    _here.epoch = getattr(iterator, "hubring_epoch", ())
    return batch


def _shard(batches: Any) -> Epoch:
    sampler = getattr(batches, "sampler", batches)
    if isinstance(sampler, DistributedSampler):
        length = len(sampler.dataset)  # type: ignore[arg-type]
        return sampler.epoch, int(sampler.shuffle), sampler.rank, sampler.num_replicas, length
    return tuple(getattr(sampler, "shard", ()))

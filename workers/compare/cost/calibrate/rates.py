"""Compute costs of one process without a wire: copies, sums, optimizer steps, and message handling.

A store is called as a shard's loop calls it, so these are the hub's own kernels. All times are the processor
time of one thread, so other programs do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hubring.ps.core.messages import Init, Push
from hubring.ps.core.types import BucketSpec, Hyper, Member, Sender, Slice, TensorSpec, View
from hubring.ps.store.consistency import BSP
from hubring.ps.store.store import KVStore
from hubring.ps.transport import wire

NUMEL = 1 << 20
"""Elements of a key: 4 MiB, a slice."""
KEYS = 8
"""Together larger than a cache, like a model."""
NBYTES = 4 * NUMEL * KEYS
MANY = 3
"""Ranks whose gradients are summed."""
MESSAGES = 200

_DECAY = {"weight_decay": 0.0, "maximize": 0.0}
_ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": 0.0, **_DECAY}
OPTIMIZERS: Mapping[str, Hyper] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": 0.0, **_DECAY},
    "Adam": {**_ADAM, "decoupled_weight_decay": 0.0},
    "AdamW": {**_ADAM, "decoupled_weight_decay": 1.0},
}


class Rounds:
    """Rounds of one store: every rank pushes every key.

    Args:
        ranks: Number of ranks.
        optimizer: Name from OPTIMIZERS.
        numel: Elements of each key.
        keys: Number of keys.
    """

    def __init__(self, ranks: int, optimizer: str, numel: int = NUMEL, keys: int = KEYS) -> None:
        self._hyper = OPTIMIZERS[optimizer]
        self._senders = [Sender(rank, 1) for rank in range(ranks)]
        self._gradients = [[torch.ones(numel) for _ in range(keys)] for _ in self._senders]
        self._clock = 0
        self._store = KVStore(BSP())
        self._store.on_view(View(1, tuple(Member(*sender) for sender in self._senders)))
        spec = BucketSpec(0, "float32", 0, optimizer, (TensorSpec("ones", (numel * keys,)),))
        self._store.assign([Slice(key, 0, key * numel, numel, 0) for key in range(keys)], [spec])
        for key in range(keys):
            self._store.handle(Init(self._senders[0], key, torch.zeros(numel)), "init")

    def take(self) -> float:
        """Runs one round of every key; returns its seconds."""
        began = time.thread_time()
        for key in range(len(self._gradients[0])):
            for sender, gradients in zip(self._senders, self._gradients, strict=True):
                self._handle(sender, key, gradients[key])
        self._clock += 1
        return time.thread_time() - began

    def _handle(self, sender: Sender, key: int, gradient: Tensor) -> None:
        message = wire.encode_request(Push(sender, key, self._clock, gradient, self._hyper), 0)
        number, request = wire.decode_request(message)
        assert isinstance(request, Push)
        for _, reply in self._store.handle(request, "push"):
            wire.encode_reply(reply, number)


def copying() -> Callable[[], float]:
    """Returns a function that measures the seconds a byte of a copy in memory."""
    source, target = torch.ones(KEYS * NUMEL), torch.zeros(KEYS * NUMEL)

    def measure() -> float:
        began = time.thread_time()
        target.copy_(source)
        return (time.thread_time() - began) / NBYTES

    return measure


def stepping(optimizer: str) -> Callable[[], float]:
    """Returns a function that measures the seconds a byte of an optimizer's step on the hub."""
    rounds = Rounds(1, optimizer)
    return lambda: rounds.take() / NBYTES


def reducing() -> Callable[[], float]:
    """Returns a function that measures the seconds a byte of one more gradient in a sum."""
    alone, many = Rounds(1, "SGD"), Rounds(MANY, "SGD")
    return lambda: max(0.0, many.take() - alone.take()) / (MANY - 1) / NBYTES


def serving() -> Callable[[], float]:
    """Returns a function that measures the seconds of one small message: decoding, handling, reply."""
    rounds = Rounds(1, "SGD", numel=1024, keys=MESSAGES)
    return lambda: rounds.take() / MESSAGES

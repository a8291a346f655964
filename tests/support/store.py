"""Messages for a shard's state machine, and checks of its answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from hubring.ps.compression.compressor import by_name
from hubring.ps.core.messages import (
    Coded,
    CollectiveResult,
    Delivery,
    Init,
    Pull,
    Push,
    ReadState,
    Refusal,
    Reply,
    StateReply,
    Ticket,
    Values,
    WriteParameters,
    WriteState,
)
from hubring.ps.core.optimizer_state import OptimizerState
from hubring.ps.core.types import BucketSpec, Hyper, Member, Sender, Slice, TensorSpec, View
from hubring.ps.store.consistency import Consistency
from hubring.ps.store.key_state import Snapshot
from hubring.ps.store.store import KVStore

# The gradient of the ledger tensor is 1 in the push's slot, so that lr -1 adds it.
ADD: Hyper = {"lr": -1.0, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": 0, "maximize": 0}
MOMENTUM: Hyper = {**ADD, "lr": 0.1, "momentum": 0.9}


def bucket(
    numel: int, optimizer: str = "SGD", dtype: str = "float32", codec: str = "", parameters: int = 1
) -> BucketSpec:
    names = ["weight", *(f"weight{number}" for number in range(1, parameters))]
    tensors = tuple(TensorSpec(name, (numel // parameters,)) for name in names)
    return BucketSpec(0, dtype, optimizer, tensors, codec)


def sender(rank: int, life: int = 1) -> Sender:
    return Sender(rank, 100 * life + rank)


def view(epoch: int, *senders: Sender) -> View:
    return View(epoch, tuple(Member(*each) for each in sorted(senders)))


def hub(
    consistency: Consistency,
    workers: int,
    *,
    numel: int = 4,
    keys: int = 1,
    parameters: int = 1,
    optimizer: str = "SGD",
    initialise: bool = True,
    codec: str = "",
    dtype: str = "float32",
) -> KVStore:
    store = KVStore(consistency)
    store.on_view(view(1, *map(sender, range(workers))))
    slices = [Slice(key, 0, key * numel, numel, 0) for key in range(keys)]
    store.assign(slices, [bucket(numel * keys, optimizer, dtype, codec, parameters)])
    if initialise and optimizer:
        for key in range(keys):
            assert store.handle(
                Init(sender(0), key, torch.zeros(numel, dtype=getattr(torch, dtype))), "init"
            ) == [Delivery("init", CollectiveResult())]
    return store


def push(rank: int, clock: int, gradient: Tensor | None = None, *, key: int = 0, hyper: Hyper = ADD) -> Push:
    return Push(sender(rank), key, clock, torch.ones(4) if gradient is None else gradient, hyper)


_SEQUENCE = itertools.count(1000)


def write(rank: int, clock: int, values: Tensor | float, sequence: int | None = None) -> WriteParameters:
    sequence = next(_SEQUENCE) if sequence is None else sequence
    whole = values if isinstance(values, Tensor) else torch.full((4,), values)
    return WriteParameters(sender(rank), 0, clock, sequence, whole)


def load(rank: int, clock: int, buffer: float | None, sequence: int | None = None) -> WriteState:
    sequence = next(_SEQUENCE) if sequence is None else sequence
    tensors = {} if buffer is None else {"momentum_buffer": torch.full((4,), buffer)}
    return WriteState(sender(rank), 0, clock, sequence, OptimizerState(tensors))


def state(store: KVStore, rank: int = 0) -> dict[str, list[float]]:
    ((_, reply),) = store.handle(ReadState(sender(rank), 0), "look")
    assert isinstance(reply, StateReply)
    return {name: tensor.tolist() for name, tensor in reply.state.tensors.items()}


def snapshot_of(store: KVStore) -> Snapshot:
    """Returns the snapshot of now."""
    assert store.capture_at(None)
    snapshot = store.captured()
    assert snapshot is not None
    return snapshot


def values_of(reply: Reply) -> Values:
    assert isinstance(reply, Values), reply
    return reply


def tensor_of(reply: Reply) -> Tensor:
    values = values_of(reply).values
    assert isinstance(values, Tensor), values
    return values


def refusal_of(deliveries: list[Delivery]) -> Refusal:
    ((_, reply),) = deliveries
    assert isinstance(reply, Refusal), reply
    return reply


def answered(deliveries: Iterable[Delivery]) -> list[Ticket]:
    return [ticket for ticket, _ in deliveries]


def parameters(store: KVStore, rank: int = 0, key: int = 0) -> Tensor:
    ((_, reply),) = store.handle(Pull(sender(rank), key), "look")
    return tensor_of(reply).clone()


def train(store: KVStore, workers: int, first: int, last: int, keys: int = 1) -> None:
    for clock, key, rank in itertools.product(range(first, last), range(keys), range(workers)):
        gradient = torch.randn(4, generator=torch.Generator().manual_seed(97 * clock + 7 * key + rank))
        assert not any(
            isinstance(reply, Refusal)
            for _, reply in store.handle(push(rank, clock, gradient, key=key, hyper=MOMENTUM), rank)
        )


def coded(tensor: Tensor, name: str = "int8") -> Coded:
    payload = torch.empty(by_name(name).nbytes(len(tensor)), dtype=torch.uint8)
    by_name(name).encode(tensor, payload)
    return Coded(name, payload, len(tensor), tensor.dtype)


def decoded(code: Tensor | Coded | None) -> Tensor:
    assert isinstance(code, Coded)
    out = torch.empty(code.numel, dtype=code.dtype)
    by_name(code.codec).decode(code.payload, out)
    return out


def coded_push(rank: int, clock: int, gradient: Tensor, *, hyper: Hyper = ADD, name: str = "int8") -> Push:
    return Push(sender(rank), 0, clock, coded(gradient, name), hyper)

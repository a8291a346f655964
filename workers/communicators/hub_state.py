"""Reads and replaces what a hub that steps holds of a model: parameters, and the optimizer's state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from hubring.ps.client.client import KVClient, PushRecord
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.optimizer_state import STEP, OptimizerState, state_dtype
from hubring.ps.core.types import BucketSpec, Slice
from hubring.ps.core.work import Work
from hubring.ps.job.sharding import parameter_parts
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.communicators.base import ParameterState, SteppingHub
from hubring.workers.communicators.slice_exchange import SliceExchange


class HubState(SteppingHub):
    """One worker's access to the hub's parameters and optimizer state.

    Args:
        client: Connections to the shards. It has pulled every key.
        exchange: Knows the slices.
        timeout: Seconds that one call may take.
        lockstep: Whether every rank takes every step.
    """

    def __init__(self, client: KVClient, exchange: SliceExchange, timeout: float, *, lockstep: bool) -> None:
        self._client = client
        self._exchange = exchange
        self._slices = exchange.slices
        self._timeout = timeout
        self._lockstep = lockstep
        self._pushes: PushRecord | None = None

    @property
    def has_model(self) -> bool:  # type: ignore[override]
        return bool(self._slices)

    def pull(self, bucket: Bucket) -> Work:
        index, stage = bucket.spec.index, bucket.stage
        if stage is None:
            return self._exchange.pull(index, bucket.host_values)
        return stage.pull(
            f"the pull of bucket {index}", lambda: self._exchange.pull(index, bucket.host_values)
        )

    def keep_parameters(self) -> None:
        self._client.close()

    def record_pushes(self) -> PushRecord | None:
        if self._pushes is None and not self._lockstep:
            self._pushes = PushRecord(self._exchange.key_of)
            self._client.on_push = self._pushes.add
        return self._pushes

    def write_parameters(self, bucket: Bucket, positions: Collection[int]) -> None:
        tensors = bucket.spec.tensors
        pieces = [
            piece
            for piece in self._slices[bucket.spec.index]
            if any(part.position in positions for part in parameter_parts(piece, tensors))
        ]
        work = self._work("sending changed parameters to the hub", len(pieces))
        for piece in pieces:
            values = bucket.values[piece.offset : piece.offset + piece.numel].to("cpu", copy=True)
            self._client.write_parameters(piece.shard, piece.key, values, work)
        work.wait(self._timeout)

    def read_state(self, buckets: Sequence[Bucket]) -> dict[str, dict[str, Tensor]]:
        wanted = [(bucket.spec, piece) for bucket in buckets for piece in self._slices[bucket.spec.index]]
        work = self._work("reading the optimizer's state from the hub", len(wanted))
        came: dict[int, OptimizerState] = {}
        for _, piece in wanted:
            self._client.read_state(piece.shard, piece.key, work, partial(_keep, came, piece.key))
        work.wait(self._timeout)
        states: dict[str, dict[str, Tensor]] = {}
        for spec, piece in wanted:
            _collect(states, came[piece.key], piece, spec)
        return states

    def write_state(self, buckets: Sequence[Bucket], states: Mapping[str, ParameterState]) -> None:
        wanted = [(bucket.spec, piece) for bucket in buckets for piece in self._slices[bucket.spec.index]]
        checked = [(piece, state_of_slice(states, piece, spec)) for spec, piece in wanted]
        work = self._work("sending the optimizer's state to the hub", len(checked))
        for piece, state in checked:
            self._client.write_state(piece.shard, piece.key, state, work)
        work.wait(self._timeout)

    def _work(self, what: str, parts: int) -> Work:
        return Work(what, parts, self._client.attend)


def state_of_slice(states: Mapping[str, ParameterState], piece: Slice, spec: BucketSpec) -> OptimizerState:
    """Returns one slice's part of the optimizer's state.

    Raises:
        ConfigError: A tensor has another number of elements than its parameter.
    """
    parts = parameter_parts(piece, spec.tensors)
    own = [states.get(spec.tensors[part.position].name, {}) for part in parts]
    names = {name: None for state in own for name in state}
    dtype = state_dtype(getattr(torch, spec.dtype))
    tensors = {
        name: torch.zeros(len(parts), dtype=torch.float32, device="cpu")
        if name == STEP
        else torch.zeros(piece.numel, dtype=dtype, device="cpu")
        for name in names
    }
    for index, (part, state) in enumerate(zip(parts, own, strict=True)):
        for name, tensor in state.items():
            if name == STEP:
                tensors[name][index] = float(tensor)
                continue
            parameter = spec.tensors[part.position]
            if tensor.numel() != parameter.numel:
                raise ConfigError(
                    f"the optimizer state {name} of {parameter.name} has shape {list(tensor.shape)}, expected"
                    f" {list(parameter.shape)}; load a state of the same model"
                )
            tensors[name][part.in_slice] = tensor.detach().reshape(-1)[part.in_parameter].to("cpu", dtype)
    fresh = [index for index, state in enumerate(own) if not state] if names else []
    return OptimizerState(tensors, tuple(fresh))


def _collect(
    states: dict[str, dict[str, Tensor]], state: OptimizerState, piece: Slice, spec: BucketSpec
) -> None:
    """Adds one slice's state to the states of its parameters."""
    for index, part in enumerate(parameter_parts(piece, spec.tensors)):
        if not state.tensors or index in state.fresh:
            continue
        parameter = spec.tensors[part.position]
        own = states.setdefault(parameter.name, {})
        for name, tensor in state.tensors.items():
            if name == STEP:
                own[name] = tensor[index].clone()
                continue
            if name not in own:
                own[name] = torch.zeros(parameter.shape, dtype=tensor.dtype, device="cpu")
            own[name].view(-1)[part.in_parameter] = tensor[part.in_slice]


def _keep(came: dict[int, OptimizerState], key: int, state: OptimizerState) -> None:
    tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
    came[key] = OptimizerState(tensors, state.fresh)

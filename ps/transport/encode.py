"""Encodes requests and replies as a transport's messages: header bytes, and a tensor's bytes as payload.

The header is data.proto's `Header`. A contiguous tensor is never copied: its memory is the payload. Several
tensors share one payload; each starts at a multiple of `ALIGNMENT` bytes, and their layouts are in the body.
Keys increase from the last layer to the first, which the next forward needs first, so a key is also its
messages' priority. A gradient or a mean may be `Coded`. Then the payload is the codec's, and dtype and shape
are those of the decoded tensor. `hubring.ps.transport.decode` is the other direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil

import torch
from torch import Tensor

from hubring.protos import data_pb2 as pb
from hubring.ps.core.errors import UsageError
from hubring.ps.core.messages import (
    Call,
    Change,
    ClosedRound,
    Coded,
    CollectiveResult,
    Contribute,
    CoordinatorCall,
    Init,
    Missing,
    Probe,
    Pull,
    Push,
    ReadState,
    Refusal,
    Reply,
    Request,
    StateReply,
    Transfer,
    Values,
    WriteParameters,
    WriteState,
)
from hubring.ps.core.optimizer_state import OptimizerState
from hubring.ps.core.types import DTYPE_BYTES, INCARNATION_BYTES, HyperTable, Sender, StepHyper
from hubring.ps.transport.base import MAX_HEADER, MAX_PAYLOAD, Message

ALIGNMENT = 8
"""Bytes. The widest dtype needs it, as do the scales and indices of an encoded payload."""

MAX_TEXT = 4096
"""Characters of a refusal's text that are sent. A header's size is limited."""

LAST = -1
"""The priority of a probe and its reply: they must not overtake what they are about."""

DTYPE_NUMBERS: dict[torch.dtype, int] = {
    getattr(torch, name): pb.DType.Value(name.upper()) for name in DTYPE_BYTES
}

_CASTABLE = {torch.float32, torch.float64}
"""Dtypes that numpy and memoryview.cast can read. These common dtypes take a quarter of the time."""


class PushHeader:
    """Encodes the pushes of one gradient, which differ in few fields. For one thread at a time.

    Args:
        sender: Who pushes.
        key: The slice's key.
        gradient: Flat, or encoded. It belongs to a message until its reply arrives.
    """

    def __init__(self, sender: Sender, key: int, gradient: Tensor | Coded) -> None:
        rank, incarnation = sender
        self._header = pb.Header(rank=rank, incarnation=incarnation.to_bytes(INCARNATION_BYTES))
        self._header.push.key = self.key = key
        self._payload = _pack(self._header, gradient).payload
        self.nbytes = self._header.payload_bytes
        self._hyper: StepHyper | None = None
        self._weight: float | None = None

    def message(
        self,
        number: int,
        clock: int,
        hyper: StepHyper,
        absent: Sequence[int] = (),
        covers: Sequence[Sender] = (),
        weight: float | None = None,
    ) -> Message:
        """Encodes a push. Raises as `encode_request`. See `Push` for the other arguments.

        Args:
            number: Identifies the request and its reply.
            clock: The sender's clock.
            hyper: Does not change: other hyperparameters are another object.
            absent: Which parameters have no gradient.
            covers: Other workers whose gradients are in the sum.
            weight: The gradient's in the mean.
        """
        header, push = self._header, self._header.push
        header.request, push.clock, push.absent = number, clock, _bitmap(absent) if absent else b""
        if hyper is not self._hyper:
            push.ClearField("hyper")
            push.ClearField("differences")
            _write_hyper(push, hyper)
            self._hyper = hyper
        if covers or push.covers:
            push.ClearField("covers")
            for rank, incarnation in covers:
                push.covers.add(rank=rank, incarnation=incarnation.to_bytes(INCARNATION_BYTES))
        if weight != self._weight:
            push.ClearField("weight")
            if weight is not None:
                push.weight = weight
            self._weight = weight
        return _message(header, self._payload, self.key)


def encode_request(request: Request | Probe, number: int, stream: bytes = b"") -> Message:
    """Encodes a request. Its tensor belongs to the message until the reply arrives.

    Args:
        request: The request.
        number: Identifies the request and its reply.
        stream: See `encode_change`; empty in a worker's request.

    Raises:
        UsageError: The request is too large.
    """
    if isinstance(request, Push):
        push = PushHeader(request.sender, request.key, request.gradient)
        also = request.absent, request.covers, request.weight
        return push.message(number, request.clock, request.hyper, *also)
    rank, incarnation = request.sender
    wired = incarnation.to_bytes(INCARNATION_BYTES)
    header = pb.Header(request=number, rank=rank, incarnation=wired, stream=stream)
    match request:
        case Pull():
            header.pull.key = request.key
            return _pack(header, None)
        case Init():
            header.init.key = request.key
            if request.state is None:
                return _pack(header, request.values)
            _write_state(header.init.state, request.state)
            header.init.values.CopyFrom(_layout(request.values))
            return _pack_bundle(header, (request.values, *request.state.tensors.values()))
        case WriteParameters():
            write = header.write_parameters
            write.key, write.clock, write.sequence = request.key, request.clock, request.sequence
            return _pack(header, request.values)
        case WriteState():
            replaced = header.write_state
            replaced.key, replaced.clock, replaced.sequence = request.key, request.clock, request.sequence
            _write_state(replaced.state, request.state)
            return _pack_bundle(header, tuple(request.state.tensors.values()))
        case ReadState():
            header.read_state.key = request.key
            return _pack(header, None)
        case Probe():
            header.probe.SetInParent()
            header.probe.requests.extend(request.requests)
            return _pack(header, None, priority=LAST)
        case Contribute():
            _write_call(header.contribute, request.call)
            header.contribute.sequence, header.contribute.settled = request.sequence, request.settled
            header.contribute.closed.extend(request.closed)
            return _pack_bundle(header, request.tensors)


def encode_change(change: Change, number: int, stream: bytes) -> Message:
    """Encodes a change that a primary forwards. Its tensor belongs to the message until the reply arrives.

    Args:
        change: The change.
        number: Its place in the stream.
        stream: The stream's secret.

    Raises:
        UsageError: The change is too large.
    """
    header = pb.Header(request=number, stream=stream)
    match change:
        case ClosedRound():
            done = header.round
            done.key, done.version, done.count = change.key, change.version, change.count
            _write_hyper(done, change.hyper)
            if change.absent:
                done.absent = _bitmap(change.absent)
            for contributor in change.contributors:
                done.ranks.append(contributor.rank)
                done.clocks.append(contributor.clock)
                done.staleness.append(contributor.staleness)
            done.excused.extend(change.excused)
            return _pack(header, change.total)
        case CoordinatorCall():
            header.command.call = change.command.value  # type: ignore[assignment]
            call = torch.frombuffer(bytearray(change.message), dtype=torch.uint8) if change.message else None
            return _pack(header, call)
        case Transfer():
            header.transfer.key = change.key
            _write_state(header.transfer.tensors, OptimizerState(change.tensors))
            return _pack_bundle(header, tuple(change.tensors.values()))
        case _:
            return encode_request(change, number, stream)


def encode_reply(reply: Reply, number: int) -> Message:
    """Encodes a reply to request `number`. Its tensor's memory is the payload."""
    header = pb.Header(request=number)
    match reply:
        case Values():
            values = header.values
            values.key, values.clock, values.version = reply.key, reply.clock, reply.version
            values.staleness, values.drain = reply.staleness, reply.drain
            if reply.saved:
                values.saved = True
            if reply.absent:
                values.absent = _bitmap(reply.absent)
            return _pack(header, reply.values, priority=reply.key)
        case CollectiveResult():
            header.result.SetInParent()
            header.result.layouts.extend(map(_layout, reply.tensors))
            return _pack_bundle(header, reply.tensors)
        case StateReply():
            header.state.key, header.state.version = reply.key, reply.version
            _write_state(header.state.state, reply.state)
            return _pack_bundle(header, tuple(reply.state.tensors.values()))
        case Missing():
            header.missing.SetInParent()
            header.missing.requests.extend(reply.requests)
            return _pack(header, None, priority=LAST)
        case Refusal():
            header.refusal.code = reply.code.value  # type: ignore[assignment]
            header.refusal.text = reply.text[:MAX_TEXT]
            return _pack(header, None)


def _pack(header: pb.Header, tensor: Tensor | Coded | None, priority: int = 0) -> Message:
    """Returns the message of a header and a tensor, whose memory is the payload."""
    if tensor is None:
        return _message(header, None, priority)
    if isinstance(tensor, Coded):
        payload, header.codec = bytes_of(tensor.payload), tensor.codec
        header.shape.append(tensor.numel)
    else:
        payload = bytes_of(tensor.contiguous())
        header.shape.extend(tensor.shape)
    header.payload_bytes = payload.nbytes
    header.dtype = DTYPE_NUMBERS[tensor.dtype]  # type: ignore[assignment]
    return _message(header, payload, priority)


def _pack_bundle(header: pb.Header, tensors: Sequence[Tensor]) -> Message:
    """Returns the message of a header and several tensors, whose layouts are in its body."""
    total = places(tensor.nbytes for tensor in tensors)[-1].stop
    header.payload_bytes = total
    return _message(header, _bundle(tensors) if 0 < total <= MAX_PAYLOAD else None)


def _message(header: pb.Header, payload: memoryview | None, priority: int = 0) -> Message:
    if header.payload_bytes > MAX_PAYLOAD:
        raise UsageError(
            f"a tensor of {header.payload_bytes} bytes is too large;"
            f" split it into parts of at most {MAX_PAYLOAD} bytes"
        )
    packed = header.SerializeToString()
    if len(packed) > MAX_HEADER:
        text = f"a header of {len(packed)} bytes is too large; the maximum is {MAX_HEADER}"
        raise UsageError(f"{text}. Use shorter names, fewer tensors, or smaller buckets (--bucket-bytes)")
    return Message(packed, payload, priority=priority)


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor as bytes. The view keeps the memory alive."""
    if not tensor.numel():
        return memoryview(b"")
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.dtype not in _CASTABLE:
        plain = plain.view(-1).view(torch.uint8)
    return plain.numpy().data.cast("B")


def places(sizes: Iterable[int]) -> list[slice]:
    """Returns the bytes of each of several tensors in one payload, then an empty slice at the end."""
    found, end = [], 0
    for size in sizes:
        start = ceil(end / ALIGNMENT) * ALIGNMENT
        end = start + size
        found.append(slice(start, end))
    return [*found, slice(end, end)]


def _bundle(tensors: Sequence[Tensor]) -> memoryview:
    """Returns one payload with all tensors. A single tensor is not copied if it is contiguous."""
    if len(tensors) == 1:
        return bytes_of(tensors[0].contiguous())
    parts = places(tensor.nbytes for tensor in tensors)
    memory = torch.empty(parts[-1].stop, dtype=torch.uint8, device="cpu")
    for part, tensor in zip(parts, tensors, strict=False):
        memory[part] = tensor.detach().reshape(-1).view(torch.uint8)
    for before, after in pairwise(parts):
        memory[before.stop : after.start] = 0  # else they would be whatever the heap held
    return bytes_of(memory)


def _layout(tensor: Tensor) -> pb.Layout:
    return pb.Layout(dtype=DTYPE_NUMBERS[tensor.dtype], shape=tensor.shape)  # type: ignore[arg-type]


def _write_state(proto: pb.OptimizerState, state: OptimizerState) -> None:
    proto.SetInParent()
    proto.names.extend(state.tensors)
    proto.fresh.extend(state.fresh)
    proto.layouts.extend(map(_layout, state.tensors.values()))


def _write_hyper(proto: pb.Push | pb.Round, hyper: StepHyper) -> None:
    """Writes hyperparameters: of a table the first row, and all that differs from it."""
    first, sent = hyper.rows[0] if isinstance(hyper, HyperTable) else hyper, proto.hyper
    for name, value in first.items():  # half the time of update
        sent[name] = value
    if isinstance(hyper, HyperTable):
        for name, value in first.items():
            if any(row[name] != value for row in hyper.rows):
                proto.differences.columns.add(name=name, values=[row[name] for row in hyper.rows])
        proto.differences.rows.extend(hyper.row_of)


def _write_call(part: pb.Contribute, call: Call) -> None:
    part.name, part.root = call.name, call.root
    part.collective, part.op = call.collective.value, call.op.value  # type: ignore[assignment]
    part.ranks.extend(call.ranks)
    part.splits.extend(call.splits)
    part.layouts.extend(
        pb.Layout(dtype=pb.DType.Value(one.dtype.upper()), shape=one.shape) for one in call.layouts
    )


def _bitmap(indices: Sequence[int]) -> bytes:
    """Returns ascending indices as bits: thousands of them fit into a header."""
    bits = bytearray(indices[-1] // 8 + 1)
    for index in indices:
        bits[index // 8] |= 1 << index % 8
    return bytes(bits)

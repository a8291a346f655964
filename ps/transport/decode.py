"""Decodes a transport's messages as requests and replies.

A received tensor is never copied: it shares the payload's memory. A message is checked before memory is
allocated. A header that does not parse, an unknown body, a shape that does not fill the payload, or a codec
that cannot read it raises `MalformedMessage`. Decoding raises nothing else.
`hubring.ps.transport.encode` describes what is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from math import prod
from typing import TypeVar
from warnings import catch_warnings, simplefilter

import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from hubring.protos import data_pb2 as pb
from hubring.ps.compression import gpu_tensor
from hubring.ps.compression.compressor import by_name
from hubring.ps.core.errors import ConfigError, HubringError
from hubring.ps.core.messages import (
    NO_REQUEST,
    Call,
    Change,
    ClosedRound,
    Code,
    Coded,
    Collective,
    CollectiveResult,
    Contribute,
    Contributor,
    CoordinatorCall,
    Forwarded,
    Init,
    Missing,
    Probe,
    Pull,
    Push,
    ReadState,
    ReduceOp,
    Refusal,
    Reply,
    Request,
    StateReply,
    StoreCommand,
    Transfer,
    Values,
    WriteParameters,
    WriteState,
)
from hubring.ps.core.optimizer_state import OptimizerState
from hubring.ps.core.types import INCARNATION_BYTES, DtypeAndShape, HyperTable, Sender, StepHyper
from hubring.ps.transport.base import MAX_PAYLOAD, Message
from hubring.ps.transport.encode import ALIGNMENT, DTYPE_NUMBERS, places

MAX_DIMENSIONS = 32

_DTYPES: dict[int, torch.dtype] = {number: dtype for dtype, number in DTYPE_NUMBERS.items()}
_NOTHING = memoryview(b"")

_Word = TypeVar("_Word", bound=IntEnum)

with catch_warnings():
    # torch has no read-only tensors and warns once. No code writes to the payload of a request or reply.
    simplefilter("ignore")
    torch.frombuffer(b"0", dtype=torch.uint8)


class MalformedMessage(HubringError):
    """A message that no peer of this version sends. `request` is a request's number, if it can be read."""

    def __init__(self, text: str, request: int | None = None) -> None:
        super().__init__(text)
        self.request = request


def decode_request(message: Message) -> tuple[int, Request | Probe | Forwarded]:
    """Returns a request's number and the request. Its tensor shares the payload's memory.

    Raises:
        MalformedMessage: The message is invalid. The text gives the reason.
    """
    header = _header(message)
    try:
        if header.stream:
            return header.request, Forwarded(header.stream, _change(header, message))
        return header.request, _request(header, message)
    except MalformedMessage as error:
        error.request = header.request
        raise


def decode_reply(message: Message) -> tuple[int, Reply]:
    """Returns the number of the answered request and the reply. Its tensor shares the payload's memory.

    Raises:
        MalformedMessage: The message is invalid. The text gives the reason.
    """
    header = _header(message)
    match header.WhichOneof("body"):
        case "values":
            came = header.values
            values = None if message.landed and not header.codec else _gradient(header, message)
            absent = _indices(came.absent) if came.absent else ()
            reply: Reply = Values(
                came.key,
                values,
                came.clock,
                came.version,
                came.staleness,
                came.drain,
                absent=absent,
                saved=came.saved,
            )
        case "result":
            reply = CollectiveResult(_bundled(header, header.result.layouts, message))
        case "state":
            _, state = _state(header, header.state.state, message)
            reply = StateReply(header.state.key, header.state.version, state)
        case "missing":
            _tensor(header, message)
            reply = Missing(tuple(header.missing.requests))
        case "refusal":
            _tensor(header, message)
            reply = Refusal(_enum(Code, header.refusal.code), header.refusal.text)
        case body:
            raise MalformedMessage(f"unexpected body of a reply: {body or 'none'}")
    return header.request, reply


def origin(message: Message) -> tuple[int, Sender]:
    """Returns the number and the sender of a message whose payload is damaged.

    Without a readable header the number is NO_REQUEST, and the sender is no member.
    """
    try:
        header = pb.Header.FromString(message.header)
    except DecodeError:
        return NO_REQUEST, Sender(0, 0)
    number = header.request if message.header else NO_REQUEST
    return number, _sender(header)


def _sender(proto: pb.Header | pb.Cover) -> Sender:
    return Sender(proto.rank, int.from_bytes(proto.incarnation[:INCARNATION_BYTES]))


def _header(message: Message) -> pb.Header:
    try:
        header = pb.Header.FromString(message.header)
    except DecodeError as error:
        raise MalformedMessage(f"invalid header of {len(message.header)} bytes: {error}") from error
    nbytes = 0 if message.payload is None else message.payload.nbytes
    if header.payload_bytes != nbytes:
        raise MalformedMessage(
            f"received a payload of {nbytes} bytes; the header gives {header.payload_bytes}", header.request
        )
    return header


def _request(header: pb.Header, message: Message) -> Request | Probe:
    sender = Sender(header.rank, int.from_bytes(header.incarnation[:INCARNATION_BYTES]))
    body = header.WhichOneof("body")
    match body:
        case "push":
            push = header.push
            gradient = _gradient(header, message)
            absent = _indices(push.absent) if push.absent else ()
            covers = tuple(map(_sender, push.covers)) if push.covers else ()
            weight = push.weight if push.HasField("weight") else None
            return Push(sender, push.key, push.clock, gradient, _hyper(push), absent, covers, weight)
        case "contribute":
            part, call = header.contribute, _call(header)
            optional = call.collective is Collective.BROADCAST
            tensors = _bundled(header, part.layouts, message, optional=optional)
            return Contribute(sender, part.sequence, call, tensors, part.settled, tuple(part.closed))
        case "pull":
            _tensor(header, message)
            return Pull(sender, header.pull.key)
        case "init" if header.init.HasField("state"):
            (values,), state = _state(header, header.init.state, message, [header.init.values])
            return Init(sender, header.init.key, _flat(header, values), state)
        case "init":
            return Init(sender, header.init.key, _flat(header, _tensor(header, message)))
        case "write_parameters":
            write, values = header.write_parameters, _flat(header, _tensor(header, message))
            return WriteParameters(sender, write.key, write.clock, write.sequence, values)
        case "write_state":
            replaced = header.write_state
            _, state = _state(header, replaced.state, message)
            return WriteState(sender, replaced.key, replaced.clock, replaced.sequence, state)
        case "read_state":
            _tensor(header, message)
            return ReadState(sender, header.read_state.key)
        case "probe":
            _tensor(header, message)
            return Probe(sender, tuple(header.probe.requests))
    raise MalformedMessage(f"unexpected body of a request: {body or 'none'}")


def _change(header: pb.Header, message: Message) -> Change:
    match header.WhichOneof("body"):
        case "round":
            done = header.round
            contributors = tuple(map(Contributor, done.ranks, done.clocks, done.staleness))
            total = _flat(header, _tensor(header, message))
            hyper, absent, excused = _hyper(done), _indices(done.absent), tuple(done.excused)
            return ClosedRound(
                done.key, done.version, total, done.count, hyper, contributors, absent, excused
            )
        case "command":
            call = bytes(message.payload or b"")
            return CoordinatorCall(_enum(StoreCommand, header.command.call), call)
        case "transfer":
            _, state = _state(header, header.transfer.tensors, message)
            return Transfer(header.transfer.key, state.tensors)
        case body:
            request = _request(header, message)
    if isinstance(request, Push | Pull | ReadState | Probe):
        raise MalformedMessage(f"unexpected body of a forwarded change: {body}")
    return request


# Tensors.


def _tensor(header: pb.Header, message: Message) -> Tensor | Coded | None:
    """Returns the tensor in a payload; None if the payload has landed, or if header and payload are empty."""
    if message.landed and not header.codec:
        return None
    payload = _NOTHING if message.payload is None else message.payload
    if not (header.dtype or header.shape or payload.nbytes or header.codec):
        return None
    dtype, shape = _layout(header)
    if header.codec:
        return _coded(header, payload, dtype, shape)
    if prod(shape) * dtype.itemsize != payload.nbytes:
        raise MalformedMessage(f"{payload.nbytes} bytes do not match {dtype} of shape {shape}")
    if not payload.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = _elements(payload, dtype)
    return flat if len(shape) == 1 else flat.view(shape)


def _gradient(header: pb.Header, message: Message) -> Tensor | Coded:
    """Returns a gradient or mean: flat, or encoded."""
    tensor = _tensor(header, message)
    if isinstance(tensor, Coded) or (tensor is not None and tensor.dim() == 1):
        return tensor
    return _flat(header, tensor)


def _flat(header: pb.Header, tensor: Tensor | Coded | None) -> Tensor:
    """Returns parameters, which are neither encoded nor shaped."""
    if isinstance(tensor, Coded):
        text = f"has codec {tensor.codec}; only gradients and means may be encoded"
        raise MalformedMessage(f"{header.WhichOneof('body')} {text}")
    if tensor is None or tensor.dim() != 1:
        found = "none" if tensor is None else f"shape {tuple(tensor.shape)}"
        raise MalformedMessage(f"expected a flat tensor, received {found}")
    return tensor


def _layout(proto: pb.Header | pb.Layout) -> tuple[torch.dtype, tuple[int, ...]]:
    """Returns a checked dtype and shape."""
    dtype, shape = _DTYPES.get(proto.dtype), tuple(proto.shape)
    if dtype is None:
        raise MalformedMessage(f"dtype {proto.dtype} is not in data.proto")
    if len(shape) == 1 and 0 <= shape[0] <= MAX_PAYLOAD:  # almost all tensors
        return dtype, shape
    if (
        len(shape) > MAX_DIMENSIONS
        or min(shape, default=0) < 0
        or prod(max(size, 1) for size in shape) > MAX_PAYLOAD
    ):
        raise MalformedMessage(f"invalid shape {shape}")
    return dtype, shape


def _elements(payload: memoryview, dtype: torch.dtype, alignment: int = 1) -> Tensor:
    """Returns the payload's memory as a flat tensor. Copies only misaligned payloads."""
    flat = torch.frombuffer(payload, dtype=dtype)
    if flat.data_ptr() % max(alignment, dtype.itemsize):
        return torch.frombuffer(payload, dtype=torch.uint8).clone().view(dtype)
    return flat


def _coded(header: pb.Header, payload: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Coded:
    """Returns the payload as Coded, after its codec has checked it."""
    if len(shape) != 1 or not dtype.is_floating_point:
        raise MalformedMessage(f"{header.codec} encodes flat floating tensors, not {dtype} of shape {shape}")
    code = (
        _elements(payload, torch.uint8, ALIGNMENT)
        if payload.nbytes
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    try:
        if header.codec == gpu_tensor.CODEC:
            gpu_tensor.check(code, shape[0], dtype)
        else:
            by_name(header.codec).check(code, shape[0])
    except ConfigError as error:
        raise MalformedMessage(str(error)) from error
    return Coded(header.codec, code, shape[0], dtype)


def _bundled(
    header: pb.Header, layouts: Iterable[pb.Layout], message: Message, *, optional: bool = False
) -> tuple[Tensor, ...]:
    """Returns the tensors of a bundle; none if `optional` and only their layouts came."""
    if header.codec or header.dtype or header.shape:
        what = f"has codec {header.codec}" if header.codec else "has a dtype outside its layouts"
        raise MalformedMessage(f"{header.WhichOneof('body')} {what}; only gradients and means may be encoded")
    checked = [_layout(layout) for layout in layouts]
    parts = places(prod(shape) * dtype.itemsize for dtype, shape in checked)
    payload, total = _NOTHING if message.payload is None else message.payload, parts[-1].stop
    if optional and total and not payload.nbytes:
        return ()
    if total != payload.nbytes:
        expected = ", ".join(f"{dtype} of shape {shape}" for dtype, shape in checked) or "no tensors"
        raise MalformedMessage(f"{payload.nbytes} bytes do not match {expected}")
    return tuple(
        _elements(payload[part], dtype).view(shape)
        if part.stop > part.start
        else torch.empty(shape, dtype=dtype, device="cpu")
        for part, (dtype, shape) in zip(parts, checked, strict=False)
    )


def _state(
    header: pb.Header, proto: pb.OptimizerState, message: Message, first: Sequence[pb.Layout] = ()
) -> tuple[tuple[Tensor, ...], OptimizerState]:
    """Returns the bundle's tensors with the layouts `first`, then the state that follows them."""
    if len(proto.names) != len(proto.layouts):
        raise MalformedMessage(f"a state has {len(proto.names)} names for {len(proto.layouts)} tensors")
    tensors = _bundled(header, [*first, *proto.layouts], message)
    named = dict(zip(proto.names, tensors[len(first) :], strict=True))
    return tensors[: len(first)], OptimizerState(named, tuple(proto.fresh))


def _hyper(proto: pb.Push | pb.Round) -> StepHyper:
    """Returns the hyperparameters of a slice."""
    first = dict(proto.hyper.items())  # half the time of dict(proto.hyper)
    if not proto.HasField("differences"):
        return first
    columns = {column.name: column.values for column in proto.differences.columns}
    sizes, row_of = set(map(len, columns.values())), tuple(proto.differences.rows)
    if not (len(sizes) == 1 and columns.keys() <= first.keys() and max(row_of, default=0) < min(sizes)):
        text = f"{len(row_of)} parameters do not fit columns {sorted(columns)} of {sorted(sizes)} rows"
        raise MalformedMessage(f"{text} for {sorted(first)}")
    rows = zip(*columns.values(), strict=True)
    return HyperTable(tuple({**first, **dict(zip(columns, row, strict=True))} for row in rows), row_of)


def _call(header: pb.Header) -> Call:
    part = header.contribute
    layouts = [_layout(layout) for layout in part.layouts]
    return Call(
        collective=_enum(Collective, part.collective),
        name=part.name,
        op=_enum(ReduceOp, part.op),
        root=part.root,
        ranks=tuple(part.ranks),
        splits=tuple(part.splits),
        layouts=tuple(DtypeAndShape(str(dtype).removeprefix("torch."), shape) for dtype, shape in layouts),
    )


def _enum(kind: type[_Word], number: int) -> _Word:
    try:
        return kind(number)
    except ValueError as error:
        raise MalformedMessage(f"{number} is not a valid {kind.__name__}") from error


def _indices(bitmap: bytes) -> tuple[int, ...]:
    """Returns the ascending indices of a bitmap."""
    held = [(8 * at, byte) for at, byte in enumerate(bitmap) if byte]
    return tuple(first + bit for first, byte in held for bit in range(8) if byte >> bit & 1)

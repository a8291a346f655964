"""Encodes requests and replies as a transport's messages: header bytes, and a tensor's bytes as payload.

The header is data.proto's `Header`. A contiguous tensor is never copied: when sent, its memory is the
payload; when received, the payload is its memory. Keys increase from the last layer to the first, which
the next forward needs first, so a key is also its messages' priority. A gradient or a mean may be `Coded`.
Then the payload is the codec's, and dtype and shape are those of the decoded tensor.

Received messages are checked before memory is allocated. A header that does not parse, an unknown body, a
shape that does not fill the payload, or a codec that cannot read it raises `MalformedMessage`. Decoding
raises nothing else. A collective's tensors share one payload (`hubring.ps.transport.bundle`); their layouts
are in the body.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from math import prod
from typing import Any, TypeVar

import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from hubring.protos import data_pb2 as pb
from hubring.ps.compression.compressor import by_name
from hubring.ps.core.errors import ConfigError, HubringError, UsageError
from hubring.ps.core.messages import (
    Call,
    Code,
    Coded,
    Collective,
    Contribute,
    Init,
    Pull,
    Push,
    ReduceOp,
    Refusal,
    Reply,
    Request,
    Result,
    Values,
)
from hubring.ps.core.types import DTYPE_BYTES, Hyper, Layout, Sender
from hubring.ps.store import gpu_tensor
from hubring.ps.store.collective import layout_of
from hubring.ps.transport.base import MAX_HEADER, MAX_PAYLOAD, Message
from hubring.ps.transport.bundle import ALIGNMENT, bundle, bytes_of, elements, size_of, unbundle

MAX_DIMENSIONS = 32
MAX_TEXT = 4096
"""Characters of a refusal's text that are sent. A header's size is limited."""

_NUMBERS = {getattr(torch, name): pb.DType.Value(name.upper()) for name in DTYPE_BYTES}
_Word = TypeVar("_Word", bound=IntEnum)
_DTYPES: dict[int, torch.dtype] = {number: dtype for dtype, number in _NUMBERS.items()}


class MalformedMessage(HubringError):
    """A message that no peer of this version sends. `request` is its number, or None if it is unreadable."""

    def __init__(self, text: str, request: int | None = None) -> None:
        super().__init__(text)
        self.request = request


def encode_request(request: Request, number: int) -> Message:
    """Encodes a request. Its tensor belongs to the message until the reply arrives.

    Raises:
        UsageError: The request is too large.
    """
    rank, incarnation = request.sender
    header = pb.Header(request=number, rank=rank, incarnation=incarnation)
    match request:
        case Push():
            push = header.push
            push.key, push.clock = request.key, request.clock
            for name, value in request.hyper.items():  # half the time of update
                push.hyper[name] = value
            return _message(header, request.gradient, priority=request.key)
        case Pull():
            header.pull.key = request.key
            return _message(header, None)
        case Init():
            header.init.key = request.key
            return _message(header, request.values)
        case Contribute():
            _write_call(header.contribute, request.call)
            header.contribute.sequence, header.contribute.settled = request.sequence, request.settled
            header.contribute.closed.extend(request.closed)
            return _bundled(header, request.tensors)


def encode_reply(reply: Reply, number: int) -> Message:
    """Encodes a reply to request `number`. Its tensor's memory is the payload."""
    header = pb.Header(request=number)
    match reply:
        case Values():
            values = header.values
            values.key, values.clock, values.version = reply.key, reply.clock, reply.version
            values.staleness, values.drain = reply.staleness, reply.drain
            return _message(header, reply.values, priority=reply.key)
        case Result():
            header.result.SetInParent()
            _write_layouts(header.result.layouts, [layout_of(tensor) for tensor in reply.tensors])
            return _bundled(header, reply.tensors)
        case Refusal():
            header.refusal.code = reply.code.value  # type: ignore[assignment]
            header.refusal.text = reply.text[:MAX_TEXT]
            return _message(header, None)


def decode_request(message: Message) -> tuple[int, Request]:
    """Returns a request's number and the request. Its tensor shares the payload's memory.

    Raises:
        MalformedMessage: The message is invalid. The text gives the reason.
    """
    header = _header(message)
    sender = Sender(header.rank, header.incarnation)
    body = header.WhichOneof("body")
    if body == "contribute":
        part = header.contribute
        call = _call(header)
        optional = call.collective is Collective.BROADCAST
        tensors = _tensors(header, part.layouts, message, optional=optional)
        closed = tuple(part.closed)
        return header.request, Contribute(sender, part.sequence, call, tensors, part.settled, closed)
    tensor = _payload(header, message)
    if body == "push":
        push = header.push
        gradient = _coded_or_flat(header, tensor)
        return header.request, Push(sender, push.key, push.clock, gradient, _hyper(push))
    if body == "pull":
        return header.request, Pull(sender, header.pull.key)
    if body == "init":
        return header.request, Init(sender, header.init.key, _flat(header, tensor))
    raise MalformedMessage(f"unexpected body of a request: {body or 'none'}", header.request)


def decode_reply(message: Message) -> tuple[int, Reply]:
    """Returns the number of the answered request and the reply. Its tensor shares the payload's memory.

    Raises:
        MalformedMessage: The message is invalid. The text gives the reason.
    """
    header = _header(message)
    body = header.WhichOneof("body")
    if body == "result":
        return header.request, Result(_tensors(header, header.result.layouts, message))
    tensor = _payload(header, message)
    if body == "values":
        proto = header.values
        values = None if tensor is None and message.landed else _coded_or_flat(header, tensor)
        return header.request, Values(
            proto.key, values, proto.clock, proto.version, proto.staleness, proto.drain
        )
    if body == "refusal":
        return header.request, Refusal(_enum(header, Code, header.refusal.code), header.refusal.text)
    raise MalformedMessage(f"unexpected body of a reply: {body or 'none'}", header.request)


def _hyper(push: pb.Push) -> Hyper:
    hyper = push.hyper
    return {name: hyper[name] for name in hyper}  # a third of the time of dict()


def _message(header: pb.Header, tensor: Tensor | Coded | None, priority: int = 0) -> Message:
    payload = None
    if tensor is not None:
        if isinstance(tensor, Coded):
            payload, shape, header.codec = bytes_of(tensor.payload), [tensor.numel], tensor.codec
        else:
            payload, shape = bytes_of(tensor.contiguous()), list(tensor.shape)
        header.payload_bytes = payload.nbytes
        header.dtype = _NUMBERS[tensor.dtype]
        header.shape.extend(shape)
        if payload.nbytes > MAX_PAYLOAD:
            raise _too_long(payload.nbytes)
    return Message(_packed(header), payload, priority=priority)


def _bundled(header: pb.Header, tensors: Sequence[Tensor]) -> Message:
    total = size_of(tensor.nbytes for tensor in tensors)
    if total > MAX_PAYLOAD:
        raise _too_long(total)
    header.payload_bytes = total
    return Message(_packed(header), bundle(tensors) if total else None)


def _too_long(nbytes: int) -> UsageError:
    return UsageError(
        f"a tensor of {nbytes} bytes is too large; split it into parts of at most {MAX_PAYLOAD} bytes"
    )


def _packed(header: pb.Header) -> bytes:
    packed = header.SerializeToString()
    if len(packed) > MAX_HEADER:
        text = f"a header of {len(packed)} bytes is too large; the maximum is {MAX_HEADER}"
        raise UsageError(f"{text}. Use shorter names or fewer tensors")
    return packed


def _header(message: Message) -> pb.Header:
    try:
        header = pb.Header.FromString(message.header)
    except DecodeError as error:
        raise MalformedMessage(f"invalid header of {len(message.header)} bytes: {error}") from error
    payload = message.payload if message.payload is not None else memoryview(b"")
    if header.payload_bytes != payload.nbytes:
        raise MalformedMessage(
            f"received a payload of {payload.nbytes} bytes; the header gives {header.payload_bytes}",
            header.request,
        )
    return header


def _payload(header: pb.Header, message: Message) -> Tensor | Coded | None:
    """Decodes the payload as the header describes it.

    Returns None if the payload has landed, or if header and payload are empty.
    """
    if message.landed and not header.codec:
        return None
    payload = message.payload if message.payload is not None else memoryview(b"")
    if not header.dtype and not header.shape and not payload.nbytes and not header.codec:
        return None
    dtype, shape = _checked(header, header)
    if header.codec:
        return _coded(header, payload, dtype, shape)
    if prod(shape) * dtype.itemsize != payload.nbytes:
        raise MalformedMessage(
            f"{payload.nbytes} bytes do not match {dtype} of shape {shape}", header.request
        )
    if not payload.nbytes:
        return torch.empty(shape, dtype=dtype)
    flat = elements(payload, dtype)
    return flat if len(shape) == 1 else flat.view(shape)


def _checked(header: pb.Header, proto: pb.Header | pb.Layout) -> tuple[torch.dtype, tuple[int, ...]]:
    """Returns a checked dtype and shape."""
    dtype, shape = _DTYPES.get(proto.dtype), tuple(proto.shape)
    if dtype is None:
        raise MalformedMessage(f"dtype {proto.dtype} is not in data.proto", header.request)
    if len(shape) == 1 and 0 <= shape[0] <= MAX_PAYLOAD:  # almost all tensors
        return dtype, shape
    if (
        len(shape) > MAX_DIMENSIONS
        or min(shape, default=0) < 0
        or prod(max(size, 1) for size in shape) > MAX_PAYLOAD
    ):
        raise MalformedMessage(f"invalid shape {shape}", header.request)
    return dtype, shape


def _tensors(
    header: pb.Header, layouts: Iterable[pb.Layout], message: Message, *, optional: bool = False
) -> tuple[Tensor, ...]:
    """Returns a collective's tensors; none if `optional` and only their layouts came."""
    if header.codec or header.dtype or header.shape:
        what = f"has codec {header.codec}" if header.codec else "has a dtype outside its layouts"
        text = f"{header.WhichOneof('body')} {what}; only gradients and means may be encoded"
        raise MalformedMessage(text, header.request)
    checked = [_checked(header, layout) for layout in layouts]
    total = size_of(prod(shape) * dtype.itemsize for dtype, shape in checked)
    payload = message.payload if message.payload is not None else memoryview(b"")
    if optional and total and not payload.nbytes:
        return ()
    if total != payload.nbytes:
        expected = ", ".join(f"{dtype} of shape {shape}" for dtype, shape in checked) or "no tensors"
        raise MalformedMessage(f"{payload.nbytes} bytes do not match {expected}", header.request)
    return tuple(unbundle(payload, checked))


def _write_call(part: pb.Contribute, call: Call) -> None:
    part.name, part.root = call.name, call.root
    part.collective, part.op = call.collective.value, call.op.value  # type: ignore[assignment]
    part.ranks.extend(call.ranks)
    part.splits.extend(call.splits)
    _write_layouts(part.layouts, call.layouts)


def _write_layouts(proto: Any, layouts: Iterable[Layout]) -> None:
    for layout in layouts:
        proto.add(dtype=pb.DType.Value(layout.dtype.upper()), shape=layout.shape)


def _call(header: pb.Header) -> Call:
    part = header.contribute
    layouts = [_checked(header, layout) for layout in part.layouts]
    return Call(
        collective=_enum(header, Collective, part.collective),
        name=part.name,
        op=_enum(header, ReduceOp, part.op),
        root=part.root,
        ranks=tuple(part.ranks),
        splits=tuple(part.splits),
        layouts=tuple(Layout(str(dtype).removeprefix("torch."), shape) for dtype, shape in layouts),
    )


def _coded(header: pb.Header, payload: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Coded:
    """Returns the payload as Coded, after its codec has checked it."""
    if len(shape) != 1 or not dtype.is_floating_point:
        text = f"{header.codec} encodes flat floating tensors, not {dtype} of shape {shape}"
        raise MalformedMessage(text, header.request)
    code = elements(payload, torch.uint8, ALIGNMENT) if payload.nbytes else torch.empty(0).byte()
    try:
        if header.codec == gpu_tensor.CODEC:
            gpu_tensor.check(code, shape[0], dtype)
        else:
            by_name(header.codec).check(code, shape[0])
    except ConfigError as error:
        raise MalformedMessage(str(error), header.request) from error
    return Coded(header.codec, code, shape[0], dtype)


def _coded_or_flat(header: pb.Header, tensor: Tensor | Coded | None) -> Tensor | Coded:
    return tensor if isinstance(tensor, Coded) else _flat(header, tensor)


def _flat(header: pb.Header, tensor: Tensor | Coded | None) -> Tensor:
    plain = _plain(header, tensor)
    if plain is None or plain.dim() != 1:
        found = "none" if plain is None else f"shape {tuple(plain.shape)}"
        raise MalformedMessage(f"expected a flat tensor, received {found}", header.request)
    return plain


def _plain(header: pb.Header, tensor: Tensor | Coded | None) -> Tensor | None:
    if isinstance(tensor, Coded):
        text = (
            f"{header.WhichOneof('body')} has codec {tensor.codec}; only gradients and means may be encoded"
        )
        raise MalformedMessage(text, header.request)
    return tensor


def _enum(header: pb.Header, kind: type[_Word], number: int) -> _Word:
    try:
        return kind(number)
    except ValueError as error:
        raise MalformedMessage(f"{number} is not a valid {kind.__name__}", header.request) from error

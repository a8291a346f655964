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

from collections.abc import Sequence
from enum import IntEnum
from typing import TypeVar

from google.protobuf.message import DecodeError
from torch import Tensor, uint8

from hubring.protos import data_pb2 as pb
from hubring.ps.core.messages import (
    NO_REQUEST,
    Call,
    Change,
    Code,
    Collective,
    Command,
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
    Result,
    Round,
    State,
    Transfer,
    Values,
    WriteParameters,
    WriteState,
)
from hubring.ps.core.optimizer_state import OptimizerState
from hubring.ps.core.types import (
    Hyper,
    Layout,
    Sender,
    incarnation_from_wire,
    incarnation_to_wire,
)
from hubring.ps.store.collective import layout_of
from hubring.ps.transport.base import Message
from hubring.ps.transport.bundle import elements
from hubring.ps.transport.payload import MalformedMessage as MalformedMessage
from hubring.ps.transport.payload import (
    bitmap,
    checked_layout,
    coded_or_flat,
    flat_of,
    indices,
    layout_proto,
    pack,
    pack_bundle,
    unpack,
    unpack_bundle,
    write_layouts,
)

MAX_TEXT = 4096
"""Characters of a refusal's text that are sent. A header's size is limited."""

LAST = -1
"""The priority of a probe and its reply: they must not overtake what they are about."""

_Word = TypeVar("_Word", bound=IntEnum)


def encode_request(request: Request | Probe, number: int, stream: bytes = b"") -> Message:
    """Encodes a request. Its tensor belongs to the message until the reply arrives.

    Args:
        request: The request.
        number: Identifies the request and its reply.
        stream: See `encode_change`; empty in a worker's request.

    Raises:
        UsageError: The request is too large.
    """
    rank, incarnation = request.sender
    wired = incarnation_to_wire(incarnation)
    header = pb.Header(request=number, rank=rank, incarnation=wired, stream=stream)
    match request:
        case Push():
            push = header.push
            push.key, push.clock = request.key, request.clock
            for name, value in request.hyper.items():  # half the time of update
                push.hyper[name] = value
            if request.absent:
                push.absent = bitmap(request.absent)
            return pack(header, request.gradient, priority=request.key)
        case Pull():
            header.pull.key = request.key
            return pack(header, None)
        case Init():
            header.init.key = request.key
            if request.state is None:
                return pack(header, request.values)
            _write_state(header.init.state, request.state)
            header.init.values.CopyFrom(layout_proto(layout_of(request.values)))
            return pack_bundle(header, (request.values, *request.state.tensors.values()))
        case WriteParameters():
            write = header.write_parameters
            write.key, write.clock, write.sequence = request.key, request.clock, request.sequence
            return pack(header, request.values)
        case WriteState():
            replaced = header.write_state
            replaced.key, replaced.clock, replaced.sequence = request.key, request.clock, request.sequence
            _write_state(replaced.state, request.state)
            return pack_bundle(header, tuple(request.state.tensors.values()))
        case ReadState():
            header.read_state.key = request.key
            return pack(header, None)
        case Probe():
            header.probe.SetInParent()
            header.probe.requests.extend(request.requests)
            return pack(header, None, priority=LAST)
        case Contribute():
            _write_call(header.contribute, request.call)
            header.contribute.sequence, header.contribute.settled = request.sequence, request.settled
            header.contribute.closed.extend(request.closed)
            return pack_bundle(header, request.tensors)


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
        case Round():
            done = header.round
            done.key, done.version, done.count = change.key, change.version, change.count
            for name, value in change.hyper.items():
                done.hyper[name] = value
            if change.absent:
                done.absent = bitmap(change.absent)
            for contributor in change.contributors:
                done.ranks.append(contributor.rank)
                done.clocks.append(contributor.clock)
                done.staleness.append(contributor.staleness)
            done.excused.extend(change.excused)
            return pack(header, change.total)
        case CoordinatorCall():
            header.command.call = change.command.value  # type: ignore[assignment]
            message = memoryview(bytearray(change.message))
            return pack(header, elements(message, uint8) if message else None)
        case Transfer():
            header.transfer.key = change.key
            _write_state(header.transfer.tensors, OptimizerState(change.tensors))
            return pack_bundle(header, tuple(change.tensors.values()))
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
            if reply.absent:
                values.absent = bitmap(reply.absent)
            return pack(header, reply.values, priority=reply.key)
        case Result():
            header.result.SetInParent()
            write_layouts(header.result.layouts, [layout_of(tensor) for tensor in reply.tensors])
            return pack_bundle(header, reply.tensors)
        case State():
            header.state.key, header.state.version = reply.key, reply.version
            _write_state(header.state.state, reply.state)
            return pack_bundle(header, tuple(reply.state.tensors.values()))
        case Missing():
            header.missing.SetInParent()
            header.missing.requests.extend(reply.requests)
            return pack(header, None, priority=LAST)
        case Refusal():
            header.refusal.code = reply.code.value  # type: ignore[assignment]
            header.refusal.text = reply.text[:MAX_TEXT]
            return pack(header, None)


def decode_request(message: Message) -> tuple[int, Request | Probe | Forwarded]:
    """Returns a request's number and the request. Its tensor shares the payload's memory.

    Raises:
        MalformedMessage: The message is invalid. The text gives the reason.
    """
    header = _header(message)
    if header.stream:
        return header.request, Forwarded(header.stream, _change(header, message))
    return header.request, _request(header, message)


def _change(header: pb.Header, message: Message) -> Change:
    body = header.WhichOneof("body")
    if body == "round":
        done = header.round
        contributors = tuple(map(Contributor, done.ranks, done.clocks, done.staleness))
        total = flat_of(header, unpack(header, message))
        absent, excused = indices(done.absent), tuple(done.excused)
        hyper = _hyper(done)
        return Round(done.key, done.version, total, done.count, hyper, contributors, absent, excused)
    if body == "command":
        call = bytes(message.payload or b"")
        return CoordinatorCall(_enum(header, Command, header.command.call), call)
    if body == "transfer":
        return Transfer(header.transfer.key, _state(header, header.transfer.tensors, message)[1].tensors)
    request = _request(header, message)
    if isinstance(request, Push | Pull | ReadState | Probe):
        raise MalformedMessage(f"unexpected body of a forwarded change: {body}", header.request)
    return request


def _request(header: pb.Header, message: Message) -> Request | Probe:
    sender = Sender(header.rank, incarnation_from_wire(header.incarnation))
    body = header.WhichOneof("body")
    if body == "contribute":
        part = header.contribute
        call = _call(header)
        optional = call.collective is Collective.BROADCAST
        tensors = unpack_bundle(header, part.layouts, message, optional=optional)
        closed = tuple(part.closed)
        return Contribute(sender, part.sequence, call, tensors, part.settled, closed)
    if body == "write_state":
        write = header.write_state
        _, state = _state(header, write.state, message)
        return WriteState(sender, write.key, write.clock, write.sequence, state)
    if body == "init" and header.init.HasField("state"):
        (values,), state = _state(header, header.init.state, message, [header.init.values])
        return Init(sender, header.init.key, flat_of(header, values), state)
    tensor = unpack(header, message)
    if body == "push":
        push = header.push
        gradient = coded_or_flat(header, tensor)
        absent = indices(push.absent)
        return Push(sender, push.key, push.clock, gradient, _hyper(push), absent)
    if body == "pull":
        return Pull(sender, header.pull.key)
    if body == "init":
        return Init(sender, header.init.key, flat_of(header, tensor))
    if body == "write_parameters":
        proto = header.write_parameters
        values = flat_of(header, tensor)
        return WriteParameters(sender, proto.key, proto.clock, proto.sequence, values)
    if body == "read_state":
        return ReadState(sender, header.read_state.key)
    if body == "probe":
        return Probe(sender, tuple(header.probe.requests))
    raise MalformedMessage(f"unexpected body of a request: {body or 'none'}", header.request)


def decode_reply(message: Message) -> tuple[int, Reply]:
    """Returns the number of the answered request and the reply. Its tensor shares the payload's memory.

    Raises:
        MalformedMessage: The message is invalid. The text gives the reason.
    """
    header = _header(message)
    body = header.WhichOneof("body")
    if body == "result":
        return header.request, Result(unpack_bundle(header, header.result.layouts, message))
    if body == "state":
        _, state = _state(header, header.state.state, message)
        return header.request, State(header.state.key, header.state.version, state)
    tensor = unpack(header, message)
    if body == "values":
        proto = header.values
        values = None if tensor is None and message.landed else coded_or_flat(header, tensor)
        return header.request, Values(
            proto.key,
            values,
            proto.clock,
            proto.version,
            proto.staleness,
            proto.drain,
            absent=indices(proto.absent),
        )
    if body == "missing":
        return header.request, Missing(tuple(header.missing.requests))
    if body == "refusal":
        return header.request, Refusal(_enum(header, Code, header.refusal.code), header.refusal.text)
    raise MalformedMessage(f"unexpected body of a reply: {body or 'none'}", header.request)


def origin(message: Message) -> tuple[int, Sender]:
    """Returns the number and the sender of a message whose payload is damaged.

    Without a readable header the number is NO_REQUEST, and the sender is no member.
    """
    try:
        header = pb.Header.FromString(message.header)
    except DecodeError:
        return NO_REQUEST, Sender(0, 0)
    number = header.request if message.header else NO_REQUEST
    return number, Sender(header.rank, incarnation_from_wire(header.incarnation))


def _hyper(sent: pb.Push | pb.Round) -> Hyper:
    hyper = sent.hyper
    return {name: hyper[name] for name in hyper}  # a third of the time of dict()


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


def _write_state(proto: pb.OptimizerState, state: OptimizerState) -> None:
    proto.SetInParent()
    proto.names.extend(state.tensors)
    proto.fresh.extend(state.fresh)
    write_layouts(proto.layouts, [layout_of(tensor) for tensor in state.tensors.values()])


def _state(
    header: pb.Header, proto: pb.OptimizerState, message: Message, first: Sequence[pb.Layout] = ()
) -> tuple[tuple[Tensor, ...], OptimizerState]:
    """Returns the bundle's tensors with the layouts `first`, then the state that follows them."""
    if len(proto.names) != len(proto.layouts):
        text = f"a state has {len(proto.names)} names for {len(proto.layouts)} tensors"
        raise MalformedMessage(text, header.request)
    tensors = unpack_bundle(header, [*first, *proto.layouts], message)
    named = dict(zip(proto.names, tensors[len(first) :], strict=True))
    return tensors[: len(first)], OptimizerState(named, tuple(proto.fresh))


def _write_call(part: pb.Contribute, call: Call) -> None:
    part.name, part.root = call.name, call.root
    part.collective, part.op = call.collective.value, call.op.value  # type: ignore[assignment]
    part.ranks.extend(call.ranks)
    part.splits.extend(call.splits)
    write_layouts(part.layouts, call.layouts)


def _call(header: pb.Header) -> Call:
    part = header.contribute
    layouts = [checked_layout(header, layout) for layout in part.layouts]
    return Call(
        collective=_enum(header, Collective, part.collective),
        name=part.name,
        op=_enum(header, ReduceOp, part.op),
        root=part.root,
        ranks=tuple(part.ranks),
        splits=tuple(part.splits),
        layouts=tuple(Layout(str(dtype).removeprefix("torch."), shape) for dtype, shape in layouts),
    )


def _enum(header: pb.Header, kind: type[_Word], number: int) -> _Word:
    try:
        return kind(number)
    except ValueError as error:
        raise MalformedMessage(f"{number} is not a valid {kind.__name__}", header.request) from error

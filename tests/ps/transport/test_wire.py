"""Messages survive the wire; what does not add up is refused, and nothing is copied without need."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hubring.protos import data_pb2 as pb
from hubring.ps.compression.compressor import by_name
from hubring.ps.core.errors import UsageError
from hubring.ps.core.messages import (
    Call,
    Code,
    Coded,
    Collective,
    Contribute,
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
    State,
    Values,
    WriteParameters,
    WriteState,
)
from hubring.ps.core.optimizer_state import OptimizerState
from hubring.ps.core.types import DTYPE_BYTES, Layout, Sender
from hubring.ps.store.collective import layout_of
from hubring.ps.transport.base import MAX_HEADER, MAX_PAYLOAD, Message
from hubring.ps.transport.bundle import bytes_of
from hubring.ps.transport.memory import address
from hubring.ps.transport.wire import (
    MAX_TEXT,
    MalformedMessage,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)

SENDER = Sender(3, 2**40)
FLAT = torch.arange(5.0)
ADAM = OptimizerState(
    {"step": torch.tensor([3.0, 0.0]), "exp_avg": FLAT.double(), "exp_avg_sq": FLAT}, (1, 70)
)


def coded(name: str = "int8", dtype: torch.dtype = torch.float32) -> Coded:
    codec, tensor = by_name(name), torch.arange(600).to(dtype)
    payload = torch.empty(codec.nbytes(600), dtype=torch.uint8)
    codec.encode(tensor, payload)
    return Coded(name, payload, 600, dtype)


def contribution(
    collective: Collective, *tensors: Tensor, name: str = "loss", settled: int = 0, **said: Any
) -> Contribute:
    """A part whose call says what its tensors are."""
    layouts = tuple(map(layout_of, tensors))
    return Contribute(SENDER, 7, Call(collective, name, layouts=layouts, **said), tensors, settled)


def same(one: Request | Probe | Reply, other: Request | Probe | Reply) -> bool:
    """Whether two messages say the same, their tensors compared by value, shape and dtype."""

    def plain(value: object) -> object:
        if isinstance(value, Coded):
            return value.codec, value.payload.tolist(), value.numel, value.dtype
        if isinstance(value, OptimizerState):
            return {name: plain(tensor) for name, tensor in value.tensors.items()}, value.fresh
        if isinstance(value, tuple):
            return [plain(each) for each in value]
        return (value.dtype, value.tolist()) if isinstance(value, Tensor) else value

    fields = type(one).__dataclass_fields__
    return type(one) is type(other) and all(
        plain(getattr(one, name)) == plain(getattr(other, name)) for name in fields
    )


def only_tensor(message: Message) -> Tensor:
    """Of a result."""
    _, came = decode_reply(message)
    assert isinstance(came, Result)
    (tensor,) = came.tensors
    return tensor


def gradient(message: Message) -> Tensor | Coded:
    """Of a push."""
    _, came = decode_request(message)
    assert isinstance(came, Push)
    return came.gradient


@pytest.mark.parametrize(
    "request_",
    [
        Init(SENDER, 0, FLAT),
        Init(SENDER, 0, FLAT.bfloat16(), ADAM),
        Init(SENDER, 0, FLAT, OptimizerState()),
        Push(SENDER, 0, 0, FLAT),
        Push(SENDER, 1, 2, FLAT, {"lr": 0.1}, absent=(0, 3, 200)),
        WriteParameters(SENDER, 4, 2**40, 7, FLAT),
        WriteState(SENDER, 4, 2**40, 7, ADAM),
        WriteState(SENDER, 0, 0, 0, OptimizerState()),
        ReadState(SENDER, 9),
        Probe(SENDER, (3, 2**63)),
        Probe(SENDER, ()),
        Push(SENDER, 2**31, 2**40, FLAT, {"lr": 0.1, "momentum": 0.9}),
        *(Push(SENDER, 1, 2, coded(name)) for name in ("bf16", "fp16", "int8", "sign", "topk:0.05")),
        Push(SENDER, 1, 2, coded("int8", torch.bfloat16), {"lr": 0.1}),
        Pull(SENDER, 0),
        Contribute(SENDER, 7, Call(Collective.BARRIER, "barrier")),
        contribution(Collective.ALLREDUCE, torch.ones(2, 3), op=ReduceOp.MAX, name="größe"),
        contribution(Collective.ALLREDUCE, torch.tensor(2.5), ranks=(0, 3, 2**31), settled=6),
        Contribute(SENDER, 9, Call(Collective.BARRIER, "barrier"), settled=4, closed=(6, 8)),
        contribution(Collective.ALLGATHER, torch.empty(0, 4)),
        contribution(Collective.ALLTOALL, torch.ones(3), splits=(2, 0, 1)),
        contribution(Collective.SCATTER, torch.ones(3).bool(), torch.empty(0), FLAT.double(), root=3),
        Contribute(SENDER, 8, Call(Collective.BROADCAST, "w", root=2, layouts=(Layout("int8", (4,)),))),
    ],
)
def test_requests_come_back_as_they_went(request_: Request | Probe) -> None:
    number, came = decode_request(encode_request(request_, 2**63))
    assert number == 2**63
    assert not isinstance(came, Forwarded)
    assert same(came, request_)


@pytest.mark.parametrize(
    "reply",
    [
        Values(0, FLAT, 0, 0),
        Values(9, FLAT, clock=4, version=17, staleness=3, drain=True),
        Values(9, coded("sign"), clock=4, version=17),
        Values(9, FLAT, clock=4, version=17, absent=(1, 200)),
        State(9, 17, ADAM),
        State(0, 0, OptimizerState()),
        Result(),
        Result((torch.tensor([[True], [False]]),)),
        Result((torch.tensor([True]), torch.tensor(1.5), FLAT)),
        Missing(()),
        Missing((0, 2**63)),
        Refusal(Code.FENCED, "rank 3 lost its place"),
    ],
)
def test_replies_come_back_as_they_went(reply: Reply) -> None:
    number, came = decode_reply(encode_reply(reply, 0))
    assert number == 0
    assert same(came, reply)


@pytest.mark.parametrize("name", DTYPE_BYTES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 2), (2, 3)])
def test_every_dtype_travels_in_every_shape(name: str, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=getattr(torch, name))
    came = only_tensor(encode_reply(Result((tensor,)), 1))
    assert came.dtype == tensor.dtype
    assert torch.equal(came, tensor)
    assert came.shape == tensor.shape


def test_a_contiguous_tensor_is_never_copied() -> None:
    tensor = torch.zeros(1000, dtype=torch.bfloat16, requires_grad=True)
    came = gradient(encode_request(Push(SENDER, 1, 1, tensor), 1))
    assert isinstance(came, Tensor)
    assert came.data_ptr() == tensor.data_ptr()


def test_what_nothing_is_absent_from_takes_no_bytes() -> None:
    push, other = (encode_request(Push(SENDER, 1, 1, FLAT, {}, absent), 1) for absent in ((), (2,)))
    assert pb.Header.FromString(push.header).push.ByteSize() == 4  # key and clock
    assert len(other.header) == len(push.header) + 3


def test_a_header_has_space_for_all_parameters_of_a_slice_of_tiny_ones() -> None:
    everything = tuple(range(50_000))
    message = encode_request(Push(SENDER, 1, 1, FLAT, {}, everything), 1)
    assert len(message.header) < MAX_HEADER / 2
    _, came = decode_request(message)
    assert isinstance(came, Push)
    assert came.absent == everything


def test_a_strided_tensor_travels_as_its_values() -> None:
    tensor = torch.arange(6).view(2, 3).t()
    assert torch.equal(only_tensor(encode_reply(Result((tensor,)), 1)), tensor)


def test_bytes_of_a_tensor_are_its_memory() -> None:
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    bytes_of(tensor)[:] = bytes_of(torch.ones(4, dtype=torch.bfloat16))
    assert tensor.tolist() == [1.0] * 4


def test_a_read_only_payload_is_borrowed_without_a_warning_or_a_copy() -> None:
    message = encode_reply(Result((FLAT,)), 1)
    assert message.payload is not None
    payload = memoryview(bytes(message.payload))
    came = only_tensor(Message(message.header, payload))
    assert torch.equal(came, FLAT)
    assert came.data_ptr() == torch.from_numpy(_writable(payload)).data_ptr()


def _writable(payload: memoryview) -> Any:
    class Face:
        __array_interface__ = {  # noqa: RUF012
            "shape": (payload.nbytes,),
            "typestr": "|u1",
            "version": 3,
            "data": (address(payload), False),
        }

    return np.asarray(Face())


def test_a_payload_keeps_its_memory_alive() -> None:
    came = only_tensor(Message(encode_reply(Result((FLAT,)), 1).header, memoryview(bytes(bytes_of(FLAT)))))
    bytearray(10_000)
    assert torch.equal(came, FLAT)


def test_a_payload_that_lies_askew_is_read_right() -> None:
    askew = bytearray(1) + bytearray(bytes_of(FLAT))
    message = Message(encode_reply(Result((FLAT,)), 1).header, memoryview(askew)[1:])
    assert torch.equal(only_tensor(message), FLAT)


def test_what_is_too_large_to_travel_is_the_callers_mistake() -> None:
    with pytest.raises(UsageError, match="Use shorter names"):
        encode_request(Contribute(SENDER, 1, Call(Collective.BARRIER, "n" * MAX_HEADER)), 1)
    with pytest.raises(UsageError, match="split it into parts"):
        encode_reply(Result((torch.empty(MAX_PAYLOAD + 1, dtype=torch.uint8),)), 1)


def test_a_long_refusal_is_cut_not_refused() -> None:
    _, came = decode_reply(encode_reply(Refusal(Code.MISMATCH, "ü" * 2 * MAX_HEADER), 1))
    assert isinstance(came, Refusal)
    assert came.text == "ü" * MAX_TEXT


def allreduce(*layouts: pb.Layout) -> pb.Contribute:
    return pb.Contribute(collective=pb.ALLREDUCE, op=pb.SUM, layouts=layouts)


FLOATS = {"dtype": pb.FLOAT32, "payload_bytes": 8}
PUSH = {"push": pb.Push(key=1)}
PART = allreduce(pb.Layout(dtype=pb.FLOAT32, shape=[3]))
PAIR = pb.Layout(dtype=pb.FLOAT32, shape=[1, 2])
HUGE = pb.Layout(dtype=pb.FLOAT32, shape=[2**62, 2**62, 0])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "body of a request: none"),
        ({"values": pb.Values()}, "body of a request: values"),
        ({**PUSH}, "expected a flat tensor"),
        ({**PUSH, **FLOATS, "shape": [1, 2]}, "expected a flat tensor"),
        ({**PUSH, **FLOATS, "shape": [3]}, "do not match"),
        ({**PUSH, **FLOATS, "shape": [-1, -2]}, "shape"),
        ({**PUSH, **FLOATS, "shape": [2**62, 2**62, 0]}, "shape"),
        ({**PUSH, **FLOATS, "shape": [1] * 33}, "shape"),
        ({**PUSH, **FLOATS, "shape": [2], "dtype": 99}, "dtype 99"),
        ({**PUSH, **FLOATS, "shape": [2], "dtype": 0}, "dtype 0"),
        ({**PUSH, **FLOATS, "shape": [2], "payload_bytes": 2**60}, "payload of 8 bytes"),
        ({"contribute": pb.Contribute(collective=99, op=pb.SUM)}, "99 is not a valid Collective"),  # type: ignore[arg-type]
        ({"contribute": pb.Contribute(collective=pb.ALLREDUCE, op=99)}, "99 is not a valid ReduceOp"),  # type: ignore[arg-type]
        ({"contribute": PART, "payload_bytes": 8}, r"8 bytes do not match torch\.float32 of shape \(3,\)"),
        ({"contribute": PART}, r"0 bytes do not match torch\.float32 of shape \(3,\)"),
        ({"contribute": PART, **FLOATS}, "has a dtype outside its layouts"),
        ({"contribute": allreduce(pb.Layout(shape=[3]))}, "dtype 0"),
        ({"contribute": allreduce(HUGE)}, "shape"),
        ({"write_parameters": pb.WriteParameters(key=1)}, "expected a flat tensor"),
        ({"write_state": pb.WriteState(state=pb.OptimizerState(names=["step"]))}, "1 names for 0 tensors"),
        ({"init": pb.Init(state=pb.OptimizerState())}, "dtype 0"),
        ({"init": pb.Init(state=pb.OptimizerState(), values=HUGE)}, "shape"),
        (
            {"init": pb.Init(state=pb.OptimizerState(), values=PAIR), "payload_bytes": 8},
            "flat tensor, received shape",
        ),
    ],
)
def test_a_request_that_does_not_add_up_is_malformed_and_bears_its_number(
    fields: dict[str, Any], says: str
) -> None:
    payload = memoryview(bytes(8)) if "payload_bytes" in fields else None
    header = pb.Header(request=5, **fields)
    with pytest.raises(MalformedMessage, match=says) as caught:
        decode_request(Message(header.SerializeToString(), payload))
    assert caught.value.request == 5


CODED = {"dtype": pb.FLOAT32, "codec": "int8", "shape": [4]}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({**PUSH, **CODED, "shape": [5]}, "payload has 8 bytes; int8 needs 9"),
        ({**PUSH, **CODED, "shape": [2**31]}, "payload has 8 bytes; int8 needs"),
        ({**PUSH, **CODED, "shape": [2, 2]}, "encodes flat floating tensors"),
        ({**PUSH, **CODED, "shape": []}, "encodes flat floating tensors"),
        ({**PUSH, **CODED, "shape": [-4]}, "shape"),
        ({**PUSH, **CODED, "dtype": pb.INT32}, "encodes flat floating tensors, not torch.int32"),
        ({**PUSH, **CODED, "dtype": 0}, "dtype 0"),
        ({**PUSH, **CODED, "codec": "zip"}, "compression 'zip'"),
        ({**PUSH, **CODED, "codec": "powersgd:4"}, "takes matrices"),
        ({**PUSH, **CODED, "codec": "topk:0.25"}, "has index 16909060, but the key has 4"),
        ({**PUSH, "codec": "int8", "payload_bytes": 0}, "dtype 0"),
        ({"init": pb.Init(key=1), **CODED}, "init has codec int8"),
        ({"contribute": allreduce(), **CODED}, "contribute has codec int8"),
    ],
)
def test_a_code_that_does_not_add_up_is_malformed(fields: dict[str, Any], says: str) -> None:
    payload = memoryview(b"\4\3\2\1\0\0\0\0"[: fields.get("payload_bytes", 8)])
    header = pb.Header(**{"request": 5, "payload_bytes": 8, **fields})
    with pytest.raises(MalformedMessage, match=says) as caught:
        decode_request(Message(header.SerializeToString(), payload))
    assert caught.value.request == 5


def test_a_code_that_lies_askew_is_moved_into_line() -> None:
    message = encode_request(Push(SENDER, 1, 2, coded()), 1)
    assert message.payload is not None
    askew = memoryview(bytearray(message.payload.nbytes + 1))[1:]
    askew[:] = message.payload
    came = gradient(Message(message.header, askew))
    assert isinstance(came, Coded)
    assert came.payload.data_ptr() % 8 == 0
    assert came.payload.tolist() == coded().payload.tolist()


def test_a_refusal_for_no_reason_is_malformed() -> None:
    header = pb.Header(request=5, refusal=pb.Refusal(text="because"))
    with pytest.raises(MalformedMessage, match="0 is not a valid Code"):
        decode_reply(Message(header.SerializeToString()))


@given(st.binary(max_size=200), st.binary(max_size=32))
def test_any_bytes_are_a_message_or_malformed(header: bytes, payload: bytes) -> None:
    for decode in (decode_request, decode_reply):
        try:
            decode(Message(header, memoryview(payload)))
        except MalformedMessage:
            continue


@given(st.data())
def test_a_header_with_a_byte_turned_is_a_message_or_malformed(data: st.DataObject) -> None:
    message = encode_request(contribution(Collective.ALLREDUCE, torch.ones(2, 3)), 1)
    header = bytearray(message.header)
    header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    for decode in (decode_request, decode_reply):
        try:
            decode(Message(bytes(header), message.payload))
        except MalformedMessage:
            continue

"""Messages survive the wire; what does not add up is refused, and nothing is copied without need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hubring.protos import data_pb2 as pb
from hubring.ps.core.errors import UsageError
from hubring.ps.core.messages import (
    Call,
    Code,
    Coded,
    Collective,
    CollectiveResult,
    Contribute,
    Forwarded,
    Probe,
    Push,
    Refusal,
    Reply,
    Request,
)
from hubring.ps.core.optimizer_state import OptimizerState
from hubring.ps.core.types import HyperTable
from hubring.ps.transport.base import MAX_HEADER, MAX_PAYLOAD, Message
from hubring.ps.transport.decode import MalformedMessage, decode_reply, decode_request
from hubring.ps.transport.encode import MAX_TEXT, bytes_of, encode_reply, encode_request
from hubring.ps.transport.mapping import address
from hubring.workers.buckets.bucketing import MOST_GROUPS
from tests.support.transports.samples import FLAT, REPLIES, REQUESTS, SENDER, coded


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
    assert isinstance(came, CollectiveResult)
    (tensor,) = came.tensors
    return tensor


def gradient(message: Message) -> Tensor | Coded:
    """Of a push."""
    _, came = decode_request(message)
    assert isinstance(came, Push)
    return came.gradient


@pytest.mark.parametrize("request_", REQUESTS)
def test_requests_come_back_as_they_went(request_: Request | Probe) -> None:
    number, came = decode_request(encode_request(request_, 2**63))
    assert number == 2**63
    assert not isinstance(came, Forwarded)
    assert same(came, request_)


@pytest.mark.parametrize("reply", REPLIES)
def test_replies_come_back_as_they_went(reply: Reply) -> None:
    number, came = decode_reply(encode_reply(reply, 0))
    assert number == 0
    assert same(came, reply)


def test_a_contiguous_tensor_is_never_copied() -> None:
    tensor = torch.zeros(1000, dtype=torch.bfloat16, requires_grad=True)
    came = gradient(encode_request(Push(SENDER, 1, 1, tensor), 1))
    assert isinstance(came, Tensor)
    assert came.data_ptr() == tensor.data_ptr()


def test_a_header_has_space_for_all_parameters_of_a_slice_of_tiny_ones() -> None:
    everything = tuple(range(50_000))
    message = encode_request(Push(SENDER, 1, 1, FLAT, {}, everything), 1)
    assert len(message.header) < MAX_HEADER / 2
    _, came = decode_request(message)
    assert isinstance(came, Push)
    assert came.absent == everything


def test_a_header_has_space_for_the_options_of_as_many_groups_as_a_bucket_has() -> None:
    names = [f"a_long_name_of_option_{index}" for index in range(8)]
    rows = tuple({name: float(row + at) for at, name in enumerate(names)} for row in range(MOST_GROUPS))
    message = encode_request(Push(SENDER, 1, 1, FLAT, HyperTable(rows, tuple(range(MOST_GROUPS)))), 1)
    assert len(message.header) < MAX_HEADER


def test_bytes_between_tensors_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones(3, dtype=torch.uint8)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: torch.full((size,), 255, dtype=dtype))
    message = encode_reply(CollectiveResult((ones, ones)), 1)
    assert message.payload is not None
    assert message.payload.tolist() == [1] * 3 + [0] * 5 + [1] * 3


def test_a_payload_that_lies_askew_is_read_right() -> None:
    askew = bytearray(1) + bytearray(bytes_of(FLAT))
    message = Message(encode_reply(CollectiveResult((FLAT,)), 1).header, memoryview(askew)[1:])
    assert torch.equal(only_tensor(message), FLAT)


def test_a_message_that_is_too_large_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="Use shorter names"):
        encode_request(Contribute(SENDER, 1, Call(Collective.BARRIER, "n" * MAX_HEADER)), 1)
    with pytest.raises(UsageError, match="split it into parts"):
        encode_reply(CollectiveResult((torch.empty(MAX_PAYLOAD + 1, dtype=torch.uint8),)), 1)


def test_a_long_refusal_is_cut_not_refused() -> None:
    _, came = decode_reply(encode_reply(Refusal(Code.MISMATCH, "ü" * 2 * MAX_HEADER), 1))
    assert isinstance(came, Refusal)
    assert came.text == "ü" * MAX_TEXT


def allreduce(*layouts: pb.Layout) -> pb.Contribute:
    return pb.Contribute(collective=pb.ALLREDUCE, op=pb.SUM, layouts=layouts)


FLOATS = {"dtype": pb.FLOAT32, "payload_bytes": 8}
PUSH = {"push": pb.Push(key=1)}


def unlike(rows: list[int], **columns: list[float]) -> pb.Push:
    made = [pb.Column(name=name, values=values) for name, values in columns.items()]
    hyper = {"lr": 0.1, "momentum": 0.0}
    return pb.Push(key=1, hyper=hyper, differences=pb.Differences(columns=made, rows=rows))


PART = allreduce(pb.Layout(dtype=pb.FLOAT32, shape=[3]))
PAIR = pb.Layout(dtype=pb.FLOAT32, shape=[1, 2])
HUGE = pb.Layout(dtype=pb.FLOAT32, shape=[2**62, 2**62, 0])
CODED = {**FLOATS, "codec": "int8", "shape": [4]}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "body of a request: none"),
        ({"values": pb.Values()}, "body of a request: values"),
        ({**PUSH}, "expected a flat tensor"),
        ({"push": unlike(rows=[0, 2], lr=[0.1, 0.2]), **FLOATS, "shape": [2]}, "2 parameters do not fit"),
        ({"push": unlike(rows=[0, 1], lr=[0.1, 0.2], momentum=[0.0]), **FLOATS, "shape": [2]}, "do not fit"),
        ({"push": unlike(rows=[0, 1], beta=[0.1, 0.2]), **FLOATS, "shape": [2]}, "do not fit"),
        ({"push": unlike(rows=[0]), **FLOATS, "shape": [2]}, "do not fit"),
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
def test_a_request_that_does_not_add_up_is_malformed_and_bears_its_number(
    fields: dict[str, Any], says: str
) -> None:
    payload = memoryview(b"\4\3\2\1\0\0\0\0") if fields.get("payload_bytes") else None
    header = pb.Header(request=5, **fields)
    with pytest.raises(MalformedMessage, match=says) as caught:
        decode_request(Message(header.SerializeToString(), payload))
    assert caught.value.request == 5


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


def test_a_code_that_lies_askew_is_moved_into_line() -> None:
    message = encode_request(Push(SENDER, 1, 2, coded()), 1)
    assert message.payload is not None
    askew = memoryview(bytearray(message.payload.nbytes + 1))[1:]
    askew[:] = message.payload
    came = gradient(Message(message.header, askew))
    assert isinstance(came, Coded)
    assert came.payload.data_ptr() % 8 == 0
    assert came.payload.tolist() == coded().payload.tolist()


def test_a_read_only_payload_is_borrowed_without_a_warning_or_a_copy() -> None:
    message = encode_reply(CollectiveResult((FLAT,)), 1)
    assert message.payload is not None
    payload = memoryview(bytes(message.payload))
    came = only_tensor(Message(message.header, payload))
    assert torch.equal(came, FLAT)
    assert came.data_ptr() == address(payload)

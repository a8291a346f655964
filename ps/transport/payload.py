"""The payload of a message, as its header describes it.

A payload is checked before memory is allocated for it; `MalformedMessage` says what does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from hubring.protos import data_pb2 as pb
from hubring.ps.compression.compressor import by_name
from hubring.ps.core.errors import ConfigError, HubringError, UsageError
from hubring.ps.core.messages import Coded
from hubring.ps.core.types import DTYPE_BYTES, Layout
from hubring.ps.store import gpu_tensor
from hubring.ps.transport.base import MAX_HEADER, MAX_PAYLOAD, Message
from hubring.ps.transport.bundle import ALIGNMENT, bundle, bytes_of, elements, size_of, unbundle

MAX_DIMENSIONS = 32

_NUMBERS = {getattr(torch, name): pb.DType.Value(name.upper()) for name in DTYPE_BYTES}
_DTYPES: dict[int, torch.dtype] = {number: dtype for dtype, number in _NUMBERS.items()}


class MalformedMessage(HubringError):
    """A message that no peer of this version sends. `request` is its number, or None if it is unreadable."""

    def __init__(self, text: str, request: int | None = None) -> None:
        super().__init__(text)
        self.request = request


def pack(header: pb.Header, tensor: Tensor | Coded | None, priority: int = 0) -> Message:
    """Returns the message of a header and a tensor, whose memory is the payload.

    Raises:
        UsageError: The header or the tensor is too large.
    """
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


def pack_bundle(header: pb.Header, tensors: Sequence[Tensor]) -> Message:
    """Returns the message of a header and several tensors, whose layouts are in its body.

    Raises:
        UsageError: The header or the tensors are too large.
    """
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


def unpack(header: pb.Header, message: Message) -> Tensor | Coded | None:
    """Decodes the payload as the header describes it.

    Returns None if the payload has landed, or if header and payload are empty.

    Raises:
        MalformedMessage: The payload does not fit the header.
    """
    if message.landed and not header.codec:
        return None
    payload = message.payload if message.payload is not None else memoryview(b"")
    if not header.dtype and not header.shape and not payload.nbytes and not header.codec:
        return None
    dtype, shape = checked_layout(header, header)
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


def checked_layout(header: pb.Header, proto: pb.Header | pb.Layout) -> tuple[torch.dtype, tuple[int, ...]]:
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


def unpack_bundle(
    header: pb.Header, layouts: Iterable[pb.Layout], message: Message, *, optional: bool = False
) -> tuple[Tensor, ...]:
    """Returns the tensors of a bundle; none if `optional` and only their layouts came.

    Raises:
        MalformedMessage: The payload does not fit the layouts.
    """
    if header.codec or header.dtype or header.shape:
        what = f"has codec {header.codec}" if header.codec else "has a dtype outside its layouts"
        text = f"{header.WhichOneof('body')} {what}; only gradients and means may be encoded"
        raise MalformedMessage(text, header.request)
    checked = [checked_layout(header, layout) for layout in layouts]
    total = size_of(prod(shape) * dtype.itemsize for dtype, shape in checked)
    payload = message.payload if message.payload is not None else memoryview(b"")
    if optional and total and not payload.nbytes:
        return ()
    if total != payload.nbytes:
        expected = ", ".join(f"{dtype} of shape {shape}" for dtype, shape in checked) or "no tensors"
        raise MalformedMessage(f"{payload.nbytes} bytes do not match {expected}", header.request)
    return tuple(unbundle(payload, checked))


def write_layouts(proto: Any, layouts: Iterable[Layout]) -> None:
    """Adds layouts to a repeated field."""
    proto.extend(map(layout_proto, layouts))


def layout_proto(layout: Layout) -> pb.Layout:
    """Returns a layout as a message."""
    return pb.Layout(dtype=pb.DType.Value(layout.dtype.upper()), shape=layout.shape)


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


def coded_or_flat(header: pb.Header, tensor: Tensor | Coded | None) -> Tensor | Coded:
    """Returns a gradient or mean.

    Raises:
        MalformedMessage: The tensor is missing, or neither encoded nor flat.
    """
    return tensor if isinstance(tensor, Coded) else flat_of(header, tensor)


def flat_of(header: pb.Header, tensor: Tensor | Coded | None) -> Tensor:
    """Returns parameters.

    Raises:
        MalformedMessage: The tensor is missing, encoded or not flat.
    """
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


def bitmap(indices: Sequence[int]) -> bytes:
    """Returns ascending indices as bits: thousands of them fit into a header."""
    bits = bytearray(indices[-1] // 8 + 1)
    for index in indices:
        bits[index // 8] |= 1 << index % 8
    return bytes(bits)


def indices(bitmap: bytes) -> tuple[int, ...]:
    """Returns the ascending indices of a bitmap."""
    held = [(8 * at, byte) for at, byte in enumerate(bitmap) if byte]
    return tuple(first + bit for first, byte in held for bit in range(8) if byte >> bit & 1)

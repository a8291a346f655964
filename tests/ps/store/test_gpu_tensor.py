"""Places in a GPU's memory as messages name them."""

from __future__ import annotations

import pytest
import torch

from hubring.protos import data_pb2 as pb
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import Coded, Push
from hubring.ps.core.types import Sender
from hubring.ps.store import gpu_tensor
from hubring.ps.store.gpu_tensor import GpuTensor
from hubring.ps.transport import wire
from hubring.ps.transport.base import Message
from hubring.ps.transport.bundle import bytes_of
from tests.support.fakes.gpu import GPU, FakeMemory

PLACE = GpuTensor(b"h" * 66, 4096, 512, b"/torch_1_2_3", 7, b"e" * 64, True, 16, b"r" * 64)


def test_a_place_comes_out_as_it_went_in_and_within_its_bound() -> None:
    code = gpu_tensor.encode(PLACE)
    assert gpu_tensor.decode(code) == PLACE
    assert code.numel() <= gpu_tensor.MAX_BYTES


def test_a_part_lies_further_on_in_the_same_storage() -> None:
    part = PLACE.part(32, b"event")
    assert (part.offset, part.ready, part.handle, part.nbytes) == (48, b"event", PLACE.handle, PLACE.nbytes)


@pytest.mark.parametrize("code", [b"", b"\x00", b"\x93\x01\x02\x03", b"\xff" * 40])
def test_bytes_that_name_no_place_are_refused(code: bytes) -> None:
    payload = torch.tensor(list(code), dtype=torch.uint8)
    with pytest.raises(ConfigError, match="are not a location in GPU memory"):
        gpu_tensor.decode(payload)


@pytest.mark.parametrize(("offset", "numel"), [(0, 1025), (4, 1024), (-4, 1), (2, 1), (4096, 1)])
def test_a_place_beyond_its_storage_is_refused(offset: int, numel: int) -> None:
    place = GpuTensor(b"h", 4096, 0, b"", 0, b"", False, offset)
    with pytest.raises(ConfigError, match="do not fit in 4096 bytes"):
        gpu_tensor.check(gpu_tensor.encode(place), numel, torch.float32)


def test_a_placed_gradient_travels_as_any_coded_one() -> None:
    gradient = Coded(gpu_tensor.CODEC, gpu_tensor.encode(PLACE), 100, torch.float32)
    message = wire.encode_request(Push(Sender(1, 2), 3, 4, gradient), 5)
    assert message.payload is not None
    assert message.payload.nbytes <= gpu_tensor.MAX_BYTES
    _, request = wire.decode_request(message)
    assert isinstance(request, Push)
    assert isinstance(request.gradient, Coded)
    assert gpu_tensor.decode(request.gradient.payload) == PLACE


def test_a_place_that_does_not_add_up_is_a_malformed_message() -> None:
    code = bytes_of(gpu_tensor.encode(PLACE))
    header = pb.Header(request=5, codec=gpu_tensor.CODEC, dtype=pb.FLOAT32, shape=[5000])
    header.payload_bytes = code.nbytes
    header.push.key = 1
    with pytest.raises(wire.MalformedMessage, match="do not fit in"):
        wire.decode_request(Message(header.SerializeToString(), code))


# Invitations.


def test_whoever_reads_the_same_memory_accepts() -> None:
    memory = FakeMemory()
    invitation = gpu_tensor.invitation(GPU, memory, torch.arange(16, dtype=torch.uint8))
    gpu_tensor.accept(invitation, GPU, memory)


def test_another_gpu_is_named_beside_ones_own() -> None:
    memory = FakeMemory()
    invitation = gpu_tensor.invitation(GPU, memory, torch.arange(16, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="parameters are on GPU-fake, but this worker's are on GPU-other"):
        gpu_tensor.accept(invitation, "GPU-other", memory)


def test_memory_that_does_not_hold_the_token_is_not_the_shards() -> None:
    memory, token = FakeMemory(), torch.arange(16, dtype=torch.uint8)
    invitation = gpu_tensor.invitation(GPU, memory, token)
    token.zero_()
    with pytest.raises(ConfigError, match="reads other bytes on GPU-fake"):
        gpu_tensor.accept(invitation, GPU, memory)


def test_memory_that_cannot_be_reached_says_why() -> None:
    invitation = gpu_tensor.invitation(GPU, FakeMemory(), torch.arange(16, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="cannot reach"):
        gpu_tensor.accept(invitation, GPU, FakeMemory())

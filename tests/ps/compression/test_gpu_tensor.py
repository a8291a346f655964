"""Places in a GPU's memory as messages name them."""

from __future__ import annotations

import pytest
import torch

from hubring.protos import data_pb2 as pb
from hubring.ps.compression import gpu_tensor
from hubring.ps.compression.gpu_tensor import GpuTensor
from hubring.ps.core.errors import ConfigError
from hubring.ps.transport.base import Message
from hubring.ps.transport.decode import MalformedMessage, decode_request
from hubring.ps.transport.encode import bytes_of
from tests.support.fakes.gpu import GPU, FakeMemory

PLACE = GpuTensor(b"h" * 66, 4096, 512, b"/torch_1_2_3", 7, b"e" * 64, True, 16, b"r" * 64)


def test_a_place_comes_out_as_it_went_in_and_within_its_bound() -> None:
    code = gpu_tensor.encode(PLACE)
    assert gpu_tensor.decode(code) == PLACE
    assert code.numel() <= gpu_tensor.MAX_BYTES


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


def test_a_place_that_does_not_add_up_is_a_malformed_message() -> None:
    code = bytes_of(gpu_tensor.encode(PLACE))
    header = pb.Header(request=5, codec=gpu_tensor.CODEC, dtype=pb.FLOAT32, shape=[5000])
    header.payload_bytes = code.nbytes
    header.push.key = 1
    with pytest.raises(MalformedMessage, match="do not fit in"):
        decode_request(Message(header.SerializeToString(), code))


# Invitations.


def test_memory_that_does_not_hold_the_token_is_not_the_shards() -> None:
    memory, token = FakeMemory(), torch.arange(16, dtype=torch.uint8)
    invitation = gpu_tensor.invitation(GPU, memory, token)
    token.zero_()
    with pytest.raises(ConfigError, match="memory sharing does not work on GPU-fake: bytes differ"):
        gpu_tensor.accept(invitation, GPU, memory)

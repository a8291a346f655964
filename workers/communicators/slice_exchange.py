"""Exchanges a bucket: its slices with their shards, encoded where the job compresses, or as a collective."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from hubring.ps.client.client import Decode, KVClient
from hubring.ps.compression.compressor import Compressor, codec_for
from hubring.ps.compression.error_feedback import ErrorFeedback
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import Call, Coded, Collective, ReduceOp
from hubring.ps.core.types import BucketSpec, Hyper, Slice
from hubring.ps.core.work import Work
from hubring.ps.job.slice_parameters import ParameterPart, parameter_parts
from hubring.workers.buckets.absence import Absence, SliceAbsence
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.pinning import Allocate
from hubring.workers.communicators.base import Communicator


class SliceCoder:
    """Encodes one slice's gradient, with error feedback, and decodes the mean from the hub.

    Args:
        codec: The job's codec.
        numel: Number of elements of the slice.
        dtype: Dtype of the gradients.
        payload: A buffer of `codec.nbytes` for the code. The answer may use the same buffer.
        parts: The parameters with elements in the slice.
    """

    def __init__(
        self,
        codec: Compressor,
        numel: int,
        dtype: torch.dtype,
        payload: Tensor,
        parts: Sequence[ParameterPart] = (),
    ) -> None:
        self.payload = payload
        self._codec = codec
        self._numel = numel
        self._feedback = ErrorFeedback(codec, numel, dtype)
        self._parts = parts
        self._kept: list[tuple[int, Tensor]] = []

    def encode(self, gradient: Tensor, absent: Collection[int] = ()) -> Coded:
        """Encodes a gradient into `payload`. Call it once per step, because it updates the residual.

        Args:
            gradient: The slice of the bucket's gradients.
            absent: The parts without a gradient, by index.
        """
        residual = self._feedback.residual
        self._kept = [(index, residual[self._parts[index].in_slice].clone()) for index in absent]
        self._feedback.encode(gradient, self.payload)
        return Coded(self._codec.name, self.payload, self._numel, gradient.dtype)

    def restore(self, absent: Collection[int]) -> None:
        """Restores the residual of parts without a gradient on any rank: the hub ignored their code."""
        everywhere = frozenset(absent)
        for index, residual in self._kept:
            if index in everywhere:
                self._feedback.residual[self._parts[index].in_slice] = residual

    def decode(self, mean: Coded, into: Tensor) -> None:
        """Decodes the mean.

        Raises:
            ConfigError: The mean's codec or length differs from the push.
        """
        if (mean.codec, mean.numel) != (self._codec.name, self._numel):
            raise ConfigError(
                f"the hub answered with {mean.numel} elements in {mean.codec}, expected"
                f" {self._numel} in {self._codec.name}: start the server and all workers with the"
                " same version"
            )
        self._codec.decode(mean.payload, into)


class SliceExchange:
    """The slices of a model's buckets.

    Args:
        client: Connections to the shards.
        means: Whether answers are means, in the codec of the gradients, and not parameters.

    Attributes:
        slices: By the hub's bucket index.
    """

    def __init__(self, client: KVClient, *, means: bool) -> None:
        self.slices: dict[int, list[Slice]] = {}
        self._client = client
        self._means = means
        self._parts: dict[int, tuple[ParameterPart, ...]] = {}
        """The parameters of each slice, by key."""
        self._specs: dict[int, BucketSpec] = {}
        self._coders: dict[int, SliceCoder] = {}
        """Coders of compressed slices, by key."""

    def add(self, spec: BucketSpec, slices: Sequence[Slice]) -> None:
        """Adds a bucket of the hub."""
        self.slices[spec.index] = list(slices)
        self._specs[spec.index] = spec
        self._parts.update((piece.key, parameter_parts(piece, spec.tensors)) for piece in slices)

    def key_of(self, name: str, element: int) -> int:
        """Returns the key that has an element of a parameter."""
        for index, spec in self._specs.items():
            for position, tensor in enumerate(spec.tensors):
                if tensor.name == name:
                    return self._key_at(index, position, element)
        raise KeyError(name)

    def _key_at(self, index: int, position: int, element: int) -> int:
        return next(
            piece.key
            for piece in self.slices[index]
            for part in self._parts[piece.key]
            if part.position == position and part.in_parameter.start <= element < part.in_parameter.stop
        )

    def compress(self, buckets: Iterable[Bucket], codec_name: str, allocate: Allocate) -> None:
        """Makes coders for the slices that compression makes shorter."""
        for bucket in buckets:
            for piece in self.slices[bucket.spec.index]:
                dtype = bucket.gradients.dtype
                codec = codec_for(codec_name, piece.numel, dtype)
                if codec is not None:
                    payload = allocate(codec.nbytes(piece.numel), torch.uint8)
                    parts = self._parts[piece.key]
                    self._coders[piece.key] = SliceCoder(codec, piece.numel, dtype, payload, parts)

    def push_pull(
        self, index: int, gradients: Tensor, into: Tensor, hyper: Hyper, absent: Absence | None = None
    ) -> Work:
        """Starts the exchange of one bucket's flat gradients; the answer lands in `into`.

        Without `absent`, every parameter has a gradient.
        """
        slices = self.slices[index]
        work = Work(exchange_name(index), len(slices), self._client.attend)
        # Compressed slices are not batched: each one travels while the next is encoded.
        with nullcontext() if self._coders else self._client.batched():
            # By priority, so that all ranks send in the same order.
            for piece in reversed(slices):
                part = slice(piece.offset, piece.offset + piece.numel)
                coder = self._coders.get(piece.key)
                lacks = absent.in_slice(self._parts[piece.key]) if absent else SliceAbsence()
                own = gradients[part]
                gradient = own if coder is None else coder.encode(own, lacks.indices)
                target, decode = self._target(piece, into[part])
                self._client.push_pull(
                    piece.shard,
                    piece.key,
                    gradient,
                    target,
                    hyper,
                    work,
                    decode,
                    lacks.indices,
                    lacks.on_reply(None if coder is None else coder.restore),
                )
        return work

    def pull(self, index: int, into: Tensor) -> Work:
        """Starts to read one bucket's parameters, or the last mean, into `into`."""
        slices = self.slices[index]
        work = Work(f"the pull of bucket {index}", len(slices), self._client.attend)
        with self._client.batched():
            for piece in slices:
                target, decode = self._target(piece, into[piece.offset : piece.offset + piece.numel])
                self._client.pull(piece.shard, piece.key, target, work, decode)
        return work

    def _target(self, piece: Slice, into: Tensor) -> tuple[Tensor, Decode | None]:
        """Returns the target of an answer. Parameters come uncompressed, means in the gradients' codec."""
        coder = self._coders.get(piece.key)
        if coder is None or not self._means:
            return into, None
        return coder.payload, partial(coder.decode, into=into)


def exchange_name(index: int) -> str:
    """Returns the name of a bucket's exchange in errors."""
    return f"the exchange of bucket {index}"


def start_mean(communicator: Communicator, name: str, bucket: Bucket) -> Work:
    """Starts the exchange of a bucket without slices, and sets `bucket.absent` as an exchange of slices does.

    The mean and the set are collectives, which every rank calls. The second has one byte for each parameter.
    """
    gradients = bucket.host_gradients
    whole = Work(f"the exchange of {name}", 2)
    present = torch.tensor(
        [position not in bucket.absent for position in range(len(bucket.spec.tensors))], dtype=torch.uint8
    )

    def note(came: torch.Tensor) -> None:
        bucket.absent = frozenset((came == 0).nonzero().flatten().tolist())

    mean = Call(Collective.ALLREDUCE, name, ReduceOp.AVERAGE)
    union = Call(Collective.ALLREDUCE, f"{name}: present", ReduceOp.MAX)
    works = [
        communicator.collective(mean, gradients, then=lambda came: gradients.copy_(came[0])),
        communicator.collective(union, present, then=lambda came: note(came[0])),
    ]
    whole.attend = works[0].attend
    for work in works:
        work.when_done(lambda one: whole.fail(one.error) if one.error else whole.complete_part())
    return whole

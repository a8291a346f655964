"""Exchanges a bucket: its slices with their shards, encoded where the job compresses, or as a collective."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from hubring.ps.client.client import Decode, KVClient, PreparedPush
from hubring.ps.compression.codecs import Compressor
from hubring.ps.compression.compressor import ErrorFeedback, codec_for
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import Call, Coded, Collective, ReduceOp
from hubring.ps.core.optimizer_state import RESIDUAL, OptimizerState
from hubring.ps.core.types import BucketSpec, HyperTable, Sender, Slice, StepHyper
from hubring.ps.core.work import Work
from hubring.ps.job.sharding import ParameterPart, parameter_parts
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.staging import Allocate
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.residuals import Residual, read, residuals_in, write

PIECE = 1 << 26
"""Elements of one collective, which a single shard takes."""

OnAbsent = Callable[[tuple[int, ...]], None]
"""Receives which of a slice's parts have no gradient on every rank."""


class Absent(Protocol):
    """A bucket's parameters without a gradient, as in `Bucket.absent`."""

    absent: frozenset[int]


class Absence:
    """The parameters without a gradient in one exchange of a bucket, which is about to be sent.

    Args:
        bucket: The bucket.
        reports: Whether to leave only the parameters that are absent on every rank in `bucket.absent`.
    """

    def __init__(self, bucket: Absent, *, reports: bool) -> None:
        self._positions = bucket.absent
        self._bucket = bucket
        self._reports = reports

    def in_slice(self, parts: Sequence[ParameterPart]) -> tuple[int, ...]:
        """Returns which of a slice's parts are absent on this rank, as ascending indices."""
        return tuple(index for index, part in enumerate(parts) if part.position in self._positions)

    def on_reply(
        self, parts: Sequence[ParameterPart], indices: Collection[int], also: OnAbsent | None = None
    ) -> OnAbsent | None:
        """Returns what to do with the answer to a slice, first `also`; None if there is nothing to do."""
        if not indices or not (also or self._reports):
            return None

        def note(absent: tuple[int, ...]) -> None:
            if also is not None:
                also(absent)
            if self._reports:
                elsewhere = {parts[index].position for index in set(indices).difference(absent)}
                self._bucket.absent = self._bucket.absent.difference(elsewhere)

        return note


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

    @property
    def residual(self) -> Tensor:
        """What the codec has left out so far; empty if it needs no feedback."""
        return self._feedback.residual

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
        self._held: dict[int, tuple[Tensor, Tensor, PreparedPush]] = {}
        """The pushes of the other slices, by key, behind the memory of their bucket."""

    def add(self, spec: BucketSpec, slices: Sequence[Slice]) -> None:
        """Adds a bucket of the hub."""
        self.slices[spec.index] = list(slices)
        self._specs[spec.index] = spec
        self._parts.update((piece.key, parameter_parts(piece, spec.tensors)) for piece in slices)

    def key_of(self, name: str, element: int) -> int:
        """Returns the key that has an element of a parameter."""
        for index, spec in self._specs.items():
            for piece in self.slices[index]:
                for part in self._parts[piece.key]:
                    named = spec.tensors[part.position].name == name
                    if named and part.in_parameter.start <= element < part.in_parameter.stop:
                        return piece.key
        raise KeyError(name)

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

    def drop_residuals(self, slices: Iterable[Slice]) -> None:
        """Forgets what compression has left out of these slices' gradients."""
        for piece in slices:
            if piece.key in self._coders:
                self._coders[piece.key].residual.zero_()

    def residuals(self) -> list[Residual]:
        """Returns the residuals of all compressed slices."""
        return [
            residual
            for piece, coder in self._fed_back()
            for residual in residuals_in(coder.residual, piece.offset, self._specs[piece.bucket].tensors)
        ]

    def read_means(self, timeout: float) -> dict[str, Tensor]:
        """Returns the shards' residuals: what compression has left out of the means."""
        coded, came = self._fed_back(), list[Residual]()
        work = Work("reading residuals from the hub", len(coded), self._client.attend)
        for piece, _ in coded:

            def keep(state: OptimizerState, piece: Slice = piece) -> None:
                came.extend(self._of_mean(piece, state.tensors[RESIDUAL].clone()))

            self._client.read_state(piece.shard, piece.key, work, keep)
        work.wait(timeout)
        return read(came)

    def write_means(self, whole: Mapping[str, Tensor], timeout: float) -> None:
        """Restores what `read_means` returned, before the next step. One rank calls it."""
        coded = self._fed_back()
        work = Work("sending residuals to the hub", len(coded), self._client.attend)
        for piece, coder in coded:
            residual = torch.zeros_like(coder.residual)
            write(self._of_mean(piece, residual), whole)
            self._client.write_state(piece.shard, piece.key, OptimizerState({RESIDUAL: residual}), work)
        work.wait(timeout)

    def _of_mean(self, piece: Slice, residual: Tensor) -> list[Residual]:
        tensors = self._specs[piece.bucket].tensors
        return list(residuals_in(residual, piece.offset, tensors, "mean of "))

    def _fed_back(self) -> list[tuple[Slice, SliceCoder]]:
        """Returns the slices whose codec has a residual, with their coders."""
        pieces = [piece for slices in self.slices.values() for piece in slices if piece.key in self._coders]
        coded = [(piece, self._coders[piece.key]) for piece in pieces]
        return [(piece, coder) for piece, coder in coded if coder.residual.numel()]

    def push_pull(
        self,
        index: int,
        gradients: Tensor,
        into: Tensor,
        hyper: StepHyper,
        absent: Absence | None = None,
        *,
        waits: bool = False,
        slices: Sequence[Slice] | None = None,
        covers: Sequence[Sender] = (),
        weight: float | None = None,
    ) -> Work:
        """Starts the exchange of one bucket's flat gradients; the answer lands in `into`.

        Without `absent`, every parameter has a gradient. `waits` is `Communicator.waits_soon`. With `slices`,
        only these are exchanged. With `covers`, the gradients are sums with those of these workers. `weight`
        is as in `Bucket`.
        """
        slices = self.slices[index] if slices is None else slices
        work = Work(exchange_name(index), len(slices), self._client.attend)
        if waits:
            self._client.wait_soon()
        # Compressed slices are not batched: each one travels while the next is encoded.
        with nullcontext() if self._coders else self._client.batched():
            # By priority, so that all ranks send in the same order.
            for piece in reversed(slices):
                decode, coder = None, self._coders.get(piece.key)
                lacks: tuple[int, ...] = ()
                on_absent = None
                if absent is not None:
                    parts = self._parts[piece.key]
                    lacks = absent.in_slice(parts)
                    on_absent = absent.on_reply(parts, lacks, None if coder is None else coder.restore)
                if coder is None:
                    push = self._prepared(piece, gradients, into)
                else:
                    part = slice(piece.offset, piece.offset + piece.numel)
                    gradient = coder.encode(gradients[part], lacks)
                    target, decode = self._target(coder, into[part])
                    push = self._client.prepare(piece.key, gradient, target)
                own = of_slice(hyper, self._parts[piece.key]) if isinstance(hyper, HyperTable) else hyper
                also = lacks, on_absent, covers, weight
                self._client.push_pull(piece.shard, push, own, work, decode, *also)
        return work

    def _prepared(self, piece: Slice, gradients: Tensor, into: Tensor) -> PreparedPush:
        """Returns the push of a slice, made once for the memory of its bucket."""
        held = self._held.get(piece.key)
        if held is None or held[0] is not gradients or held[1] is not into:
            part = slice(piece.offset, piece.offset + piece.numel)
            push = self._client.prepare(piece.key, gradients[part], into[part])
            held = self._held[piece.key] = gradients, into, push
        return held[2]

    def pull(self, index: int, into: Tensor) -> Work:
        """Starts to read one bucket's parameters, or the last mean, into `into`."""
        slices = self.slices[index]
        work = Work(f"the pull of bucket {index}", len(slices), self._client.attend)
        with self._client.batched():
            for piece in slices:
                target, decode = into[piece.offset : piece.offset + piece.numel], None
                if piece.key in self._coders:
                    target, decode = self._target(self._coders[piece.key], target)
                self._client.pull(piece.shard, piece.key, target, work, decode)
        return work

    def _target(self, coder: SliceCoder, into: Tensor) -> tuple[Tensor, Decode | None]:
        """Returns the target of an answer. Parameters come uncompressed, means in the gradients' codec."""
        return (coder.payload, partial(coder.decode, into=into)) if self._means else (into, None)


def of_slice(hyper: HyperTable, parts: Sequence[ParameterPart]) -> StepHyper:
    """Returns the hyperparameters of a slice's parameters, of those of its bucket."""
    return hyper.part(slice(parts[0].position, parts[-1].position + 1))


def exchange_name(index: int) -> str:
    """Returns the name of a bucket's exchange in errors."""
    return f"the exchange of bucket {index}"


def start_mean(communicator: Communicator, name: str, bucket: Bucket, gradients: Tensor) -> Work:
    """Starts the exchange of a bucket without slices, and sets `bucket.absent` as an exchange of slices does.

    The mean and the set are collectives, which every rank calls. The last has one byte for each parameter.

    Args:
        communicator: Connects the ranks.
        name: Names the collectives.
        bucket: The bucket, sealed.
        gradients: Its flat gradients, on the device or in host memory, which the mean overwrites.
    """
    if bucket.weight is not None:
        gradients.mul_(share(communicator, bucket.weight, f"{name}: weight"))
    present = torch.tensor(
        [position not in bucket.absent for position in range(len(bucket.spec.tensors))],
        dtype=torch.uint8,
        device="cpu",
    )

    def note(came: Sequence[Tensor]) -> None:
        bucket.absent = frozenset((came[0] == 0).nonzero().flatten().tolist())

    works = []
    for number, part in enumerate(torch.split(gradients, PIECE)):
        mean = Call(Collective.ALLREDUCE, f"{name}: {number}", ReduceOp.AVERAGE)
        works.append(communicator.collective(mean, part, then=partial(_land, part)))
    union = Call(Collective.ALLREDUCE, f"{name}: present", ReduceOp.MAX)
    works.append(communicator.collective(union, present, then=note))
    whole = Work(f"the exchange of {name}", len(works))
    whole.attend = works[0].attend
    for work in works:
        work.when_done(lambda one: whole.fail(one.error) if one.error else whole.complete_part())
    return whole


def share(communicator: Communicator, weight: float, name: str) -> float:
    """Returns by what this rank's gradients must be multiplied, so that their plain mean is weighted.

    Every rank calls it, with one name: it is a collective, which adds the ranks' weights.
    """
    own = torch.tensor([weight], dtype=torch.float64, device="cpu")
    whole = communicator.collective(Call(Collective.ALLREDUCE, name, ReduceOp.SUM), own).get().item()
    return weight * communicator.size / whole if whole else 0.0


def _land(part: Tensor, came: Sequence[Tensor]) -> Tensor:
    return part.copy_(came[0])

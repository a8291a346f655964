"""One key on its shard: values and their version, the open round, and the waiting workers.

Law: `values` never changes its memory, because it is the optimizer's parameter. A
contribution's gradient is only read, and dropped when its round closes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from hubring.ps.compression import compressor
from hubring.ps.compression.compressor import Compressor, codec_for
from hubring.ps.compression.error_feedback import ErrorFeedback
from hubring.ps.core.errors import CheckpointCorrupt, ConfigError
from hubring.ps.core.messages import Coded, Push, Ticket
from hubring.ps.core.types import BucketSpec, Sender, Slice, TensorSpec
from hubring.ps.optim.blocks import BlockSteps
from hubring.ps.store.snapshot import KeyState


class Contribution(NamedTuple):
    """A gradient that waits for its round to close."""

    push: Push
    tickets: list[Ticket]
    """One for each try: only the sender knows on which connection it still listens."""
    gradient: Tensor | Coded
    """The push's gradient, in the shard's memory."""


class Reader(NamedTuple):
    """A worker that waits for values.

    `staleness` is the staleness of the push that the values answer. With `shown`, the worker sent its
    gradient as a location in GPU memory, and gets the location of the values.
    """

    sender: Sender
    tickets: list[Ticket]
    staleness: int = 0
    shown: bool = False


class Settled(NamedTuple):
    """A rank's last push that was applied or dropped, for the reply to a retry."""

    clock: int
    staleness: int


class CodedMean:
    """A mean gradient for the readers, compressed with the codec of the gradients.

    The next mean adds the codec's error (error feedback). Before the first round
    the mean is the code of zeros. The bytes change only when a round closes, as the
    values do.
    """

    def __init__(self, codec: Compressor, values: Tensor) -> None:
        payload = torch.zeros(codec.nbytes(values.numel()), dtype=torch.uint8)
        self.latest = Coded(codec.name, payload, values.numel(), values.dtype)
        self._feedback = ErrorFeedback(codec, values.numel(), values.dtype)

    def encode(self, values: Tensor) -> None:
        """Encodes the mean for the readers."""
        self._feedback.encode(values, self.latest.payload)


@dataclass(slots=True)
class Entry:
    """One key's state; ranks are those of live workers.

    Attributes:
        piece: The key's part of its bucket.
        tensors: The parameters of that bucket.
        contributions: The open round, by rank.
        readers: Workers whose push is over, and which wait to read.
        pullers: Workers that wait for the initial values.
        read: The version in the last reply to each rank.
        settled: The last applied or dropped push of each rank.
        drain_from: Replies with this version or a later one announce the end of the job.
        codec: The codec of the gradients; None if they are uncompressed.
        coded: The compressed values for readers; None if values are sent uncompressed.
        shown: Whether workers may exchange gradients and values as locations in GPU memory.
    """

    key: int
    values: Tensor
    optimizer: BlockSteps
    piece: Slice
    tensors: tuple[TensorSpec, ...]
    initialised: bool
    version: int = 0
    contributions: dict[int, Contribution] = field(default_factory=dict)
    readers: dict[int, Reader] = field(default_factory=dict)
    pullers: dict[int, Reader] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)
    settled: dict[int, Settled] = field(default_factory=dict)
    drain_from: float = inf
    codec: Compressor | None = None
    coded: CodedMean | None = None
    shown: bool = False

    @classmethod
    def make(cls, piece: Slice, bucket: BucketSpec, memory: Tensor, *, finite: bool = True) -> Entry:
        """Creates an entry whose values are the first bytes of `memory` (flat uint8, zeroed).

        With an optimizer on the workers, the entry needs no initial values. With an optimizer on the hub,
        `finite` makes the entry refuse gradients that are not finite.

        Raises:
            ConfigError: The dtype has no mean, or the hub does not support the optimizer or codec there.
        """
        dtype: torch.dtype = getattr(torch, bucket.dtype)
        if not dtype.is_floating_point:
            raise ConfigError(
                f"bucket {bucket.index} has dtype {bucket.dtype}; only floating dtypes have gradients"
            )
        if bucket.codec and memory.device.type != "cpu":
            raise ConfigError(
                f"--compress {bucket.codec} runs only on the CPU, but this server's parameters are on"
                f" {memory.device}; leave out --compress, or restart the server with --device cpu"
            )
        values = memory[: piece.numel * dtype.itemsize].view(dtype)
        steps = BlockSteps(bucket.optimizer, values, finite=finite)
        entry = cls(piece.key, values, steps, piece, bucket.tensors, initialised=not bucket.optimizer)
        entry.codec = codec_for(bucket.codec, piece.numel, dtype)
        if entry.codec is not None and not bucket.optimizer:
            entry.coded = CodedMean(entry.codec, values)
        return entry

    @property
    def answer(self) -> Tensor | Coded:
        """The values for readers: parameters are uncompressed, a mean has the codec of the gradients."""
        return self.values if self.coded is None else self.coded.latest

    def close(self, scratch: Tensor) -> list[Contribution]:
        """Applies the mean of the open round; returns its contributions in rank order.

        Args:
            scratch: At least twice as long as the values, with the same dtype.

        Raises:
            NonFinite: The sum has a NaN or an infinity. The values are invalid from then on.
        """
        contributions = [self.contributions[rank] for rank in sorted(self.contributions)]
        gradients = self._plain([contribution.gradient for contribution in contributions], scratch)
        # Ranks should agree on the hyperparameters. If not, use the lowest rank's, so that reruns are equal.
        self.optimizer.step(gradients, contributions[0].push.hyper, scratch)
        if self.coded is not None:
            self.coded.encode(self.values)
        self.version += 1
        self.contributions.clear()
        return contributions

    def parameter_at(self, index: int) -> TensorSpec:
        """Returns the parameter that contains one element of the values."""
        ends = accumulate(tensor.numel for tensor in self.tensors)
        place = self.piece.offset + index
        return next(tensor for tensor, end in zip(self.tensors, ends, strict=True) if place < end)

    def _plain(self, gradients: list[Tensor | Coded], scratch: Tensor) -> list[Tensor]:
        """Returns uncompressed gradients unchanged, or the mean of compressed gradients."""
        plain = [gradient for gradient in gradients if isinstance(gradient, Tensor)]
        coded = [gradient for gradient in gradients if isinstance(gradient, Coded)]
        # The store refuses the other form. Without the assertion, the mean would silently skip gradients.
        assert not (plain if self.codec else coded), f"key {self.key} has gradients in another form"
        if self.codec is None:
            return plain
        mean, spare = scratch[: self.values.numel()], scratch[self.values.numel() :]
        compressor.mean_into(mean, self.codec, coded, spare)
        return [mean]

    def forget(self, ranks: Iterable[int]) -> list[Ticket]:
        """Removes ranks; returns the tickets of their unanswered requests."""
        waiting: list[Contribution | Reader] = []
        for rank in ranks:
            for table in (self.contributions, self.readers, self.pullers):
                if rank in table:
                    waiting.append(table.pop(rank))
            self.read.pop(rank, None)
            self.settled.pop(rank, None)
        return [ticket for waiter in waiting for ticket in waiter.tickets]

    def waiting(self) -> Collection[int]:
        """Returns the ranks with unanswered requests."""
        return self.contributions.keys() | self.readers.keys() | self.pullers.keys()

    def export(self) -> KeyState:
        """Returns a copy of the state for a checkpoint, without clocks."""
        state = {name: tensor.cpu() for name, tensor in self.optimizer.state().items()}
        return KeyState(self.values.to("cpu", copy=True), state, self.version)

    def restore(self, state: KeyState) -> None:
        """Restores a state from `export`.

        Raises:
            CheckpointCorrupt: The state has another size or dtype.
        """
        saved = state.values
        tensors = [saved, *(tensor for tensor in state.optimizer.values() if tensor.dim())]
        if any((one.shape, one.dtype) != (self.values.shape, self.values.dtype) for one in tensors):
            raise CheckpointCorrupt(
                f"the checkpoint holds {saved.dtype}{list(saved.shape)} for key {self.key}, expected"
                f" {self.values.dtype}{list(self.values.shape)}; another job wrote this checkpoint"
            )
        self.values.copy_(state.values)
        self.optimizer.load(state.optimizer)
        self.version = state.version
        self.initialised = True

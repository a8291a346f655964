"""One key on its shard: values and their version, the round that is open, and who waits.

Law: `values` keeps its memory for life, since it is the optimizer's parameter.
A contribution's gradient is only read, and forgotten when its round closes.
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
    """One for every try: which of them its sender still listens to, it alone knows."""
    gradient: Tensor | Coded
    """The push's, where the shard keeps its own."""


class Reader(NamedTuple):
    """Somebody who waits for values; `staleness` is that of the push which they answer.

    `shown`: it gave its gradient as a place, and gets the values' place.
    """

    sender: Sender
    tickets: list[Ticket]
    staleness: int = 0
    shown: bool = False


class Settled(NamedTuple):
    """A rank's last push that was applied or dropped, for whoever asks again."""

    clock: int
    staleness: int


class CodedMean:
    """A mean gradient on its way back, in the codec of those that it was made from.

    What the codec left out goes with the next mean. Before the first round it is
    the code of zeros. Its bytes change only when a round closes, as the values do.
    """

    def __init__(self, codec: Compressor, values: Tensor) -> None:
        payload = torch.zeros(codec.nbytes(values.numel()), dtype=torch.uint8)
        self.latest = Coded(codec.name, payload, values.numel(), values.dtype)
        self._feedback = ErrorFeedback(codec, values.numel(), values.dtype)

    def encode(self, values: Tensor) -> None:
        """Makes the latest mean the one that readers get."""
        self._feedback.encode(values, self.latest.payload)


@dataclass(slots=True)
class Entry:
    """One key's state; ranks are those of live workers.

    Attributes:
        piece: Which part of its bucket this is.
        tensors: The parameters of that bucket.
        contributions: The open round, by rank.
        readers: Who pushed, and waits until it may read.
        pullers: Who waits for the first values.
        read: The version that a rank was sent last.
        settled: The last push of a rank that is over.
        drain_from: Replies of this version and later say that the job ends.
        codec: What gradients come in; None: as they are.
        coded: The values as readers get them, where they are not sent as they are.
        shown: Gradients may be given, and values read, where they lie on a GPU.
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
        """An entry whose values are the first bytes of `memory` (flat uint8), all of them zero.

        Where workers step themselves, it needs no first values; elsewhere, `finite` has it refuse gradients
        that are not.

        Raises:
            ConfigError: The dtype has no mean, or the hub does not run the optimizer or the codec there.
        """
        dtype: torch.dtype = getattr(torch, bucket.dtype)
        if not dtype.is_floating_point:
            raise ConfigError(
                f"bucket {bucket.index} holds {bucket.dtype}: only floating dtypes have gradients"
            )
        if bucket.codec and memory.device.type != "cpu":
            raise ConfigError(
                f"--compress {bucket.codec} runs on the CPU alone, and this server keeps its parameters on"
                f" {memory.device}: leave out --compress, or start the server with --device cpu"
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
        """What readers get: parameters as they are, but a mean as compressed as it was given."""
        return self.values if self.coded is None else self.coded.latest

    def close(self, scratch: Tensor) -> list[Contribution]:
        """Applies the mean of the open round; returns who gave it, in rank order.

        Args:
            scratch: At least twice as long as the values, and of their dtype.

        Raises:
            NonFinite: Their sum is NaN or infinite somewhere; the values count for nothing any more.
        """
        contributions = [self.contributions[rank] for rank in sorted(self.contributions)]
        gradients = self._plain([contribution.gradient for contribution in contributions], scratch)
        # Ranks should agree on the hyperparameters; where they do not, every rerun takes the same.
        self.optimizer.step(gradients, contributions[0].push.hyper, scratch)
        if self.coded is not None:
            self.coded.encode(self.values)
        self.version += 1
        self.contributions.clear()
        return contributions

    def parameter_at(self, index: int) -> TensorSpec:
        """The parameter that one element of the values is part of."""
        ends = accumulate(tensor.numel for tensor in self.tensors)
        place = self.piece.offset + index
        return next(tensor for tensor, end in zip(self.tensors, ends, strict=True) if place < end)

    def _plain(self, gradients: list[Tensor | Coded], scratch: Tensor) -> list[Tensor]:
        """Gradients as they came or, of those in a codec, their mean."""
        plain = [gradient for gradient in gradients if isinstance(gradient, Tensor)]
        coded = [gradient for gradient in gradients if isinstance(gradient, Coded)]
        # The store refuses the others, and a mean over fewer would be silent.
        assert not (plain if self.codec else coded), f"key {self.key} took gradients in another form"
        if self.codec is None:
            return plain
        mean, spare = scratch[: self.values.numel()], scratch[self.values.numel() :]
        compressor.mean_into(mean, self.codec, coded, spare)
        return [mean]

    def forget(self, ranks: Iterable[int]) -> list[Ticket]:
        """Takes ranks out; returns the tickets of all that they still waited for."""
        waiting: list[Contribution | Reader] = []
        for rank in ranks:
            for table in (self.contributions, self.readers, self.pullers):
                if rank in table:
                    waiting.append(table.pop(rank))
            self.read.pop(rank, None)
            self.settled.pop(rank, None)
        return [ticket for waiter in waiting for ticket in waiter.tickets]

    def waiting(self) -> Collection[int]:
        """Ranks that wait for anything."""
        return self.contributions.keys() | self.readers.keys() | self.pullers.keys()

    def export(self) -> KeyState:
        """A copy of what a checkpoint holds, the clocks left out."""
        state = {name: tensor.cpu() for name, tensor in self.optimizer.state().items()}
        return KeyState(self.values.to("cpu", copy=True), state, self.version)

    def restore(self, state: KeyState) -> None:
        """Goes on from what `export` gave.

        Raises:
            CheckpointCorrupt: It is of another size or dtype.
        """
        saved = state.values
        kept = [saved, *(tensor for tensor in state.optimizer.values() if tensor.dim())]
        if any((one.shape, one.dtype) != (self.values.shape, self.values.dtype) for one in kept):
            raise CheckpointCorrupt(
                f"the checkpoint holds {saved.dtype}{list(saved.shape)} under key {self.key}, where the job"
                f" has {self.values.dtype}{list(self.values.shape)}: it was made by another job"
            )
        self.values.copy_(state.values)
        self.optimizer.load(state.optimizer)
        self.version = state.version
        self.initialised = True

"""One key on its shard: values and their version, the open round, the waiting workers, and their clocks.

Law: `values` never changes its memory, because it is the optimizer's parameter. A contribution's gradient is
only read, and dropped when its round closes.

Each push counts once. The clocks of a rank's pushes are consecutive, so one number per rank is enough. A push
below the number was applied or dropped. A push at the number is new, or waits in the open round. A push above
it is too early. Only applied pushes survive a restart: the sender of another sends it again. After RIFL (Lee
et al., SOSP 2015) and Kafka's idempotent producer. The view fences earlier incarnations of a rank.

A push can cover other ranks: its gradient is a sum with theirs. Their own pushes of the open round are then
not added, but wait for its answer. If the sender is lost before the round closes, they count again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from hubring.ps.compression import compressor
from hubring.ps.compression.codecs import Compressor
from hubring.ps.compression.compressor import CodedMean, codec_for
from hubring.ps.compression.gpu_tensor import is_placed
from hubring.ps.core.errors import CheckpointCorrupt, ConfigError
from hubring.ps.core.messages import ClosedRound, Coded, Push, Ticket
from hubring.ps.core.optimizer_state import RESIDUAL, STEP, OptimizerState, state_dtype
from hubring.ps.core.types import BucketSpec, Sender, Slice, StepHyper, TensorSpec
from hubring.ps.job.sharding import ParameterPart, parameter_parts
from hubring.ps.optim.blocks import BlockSteps
from hubring.ps.store.script_changes import PendingWrites


class Contribution(NamedTuple):
    """A gradient that waits for its round to close."""

    push: Push
    tickets: list[Ticket]
    """One for each try: only the sender knows on which connection it still listens."""
    gradient: Tensor | Coded
    """The push's gradient, in the shard's memory."""


class Round(NamedTuple):
    """A round of one key that can close.

    Attributes:
        contributions: Those that are added, in rank order.
        gradients: Uncompressed, or the mean of compressed ones.
        divisor: What the sum of `gradients` is divided by.
        absent: Which parameters of the slice have no gradient in any contribution.
        excused: The ranks that agree with whatever the others wrote.
    """

    contributions: list[Contribution]
    gradients: list[Tensor]
    divisor: int
    absent: tuple[int, ...]
    excused: set[int]


class Reader(NamedTuple):
    """A worker that waits for values.

    `clock` is that of the next push. `staleness` and `absent` are those of the push that the values answer;
    the values of a pull answer none, and `clock` is then None. With `shown`, the worker sent its
    gradient as a location in GPU memory, and gets the location of the values.
    """

    sender: Sender
    tickets: list[Ticket]
    clock: int | None = None
    staleness: int = 0
    shown: bool = False
    absent: tuple[int, ...] = ()


class Settled(NamedTuple):
    """A rank's last push that was applied or dropped, for the reply to a retry.

    `absent` are the slice's parameters without a gradient in any push of its round.
    """

    clock: int
    staleness: int = 0
    absent: tuple[int, ...] = ()


@dataclass(slots=True)
class KeyState:
    """The state of one key that a restart restores.

    Attributes:
        values: Flat parameters.
        optimizer: The optimizer's tensors by name, as `OptimizerState.saved` returns them.
        version: How many updates the values include.
        clocks: Completed steps by rank, also of ranks that left.
    """

    values: Tensor
    optimizer: dict[str, Tensor]
    version: int
    clocks: dict[int, int] = field(default_factory=dict)


Snapshot = dict[int, KeyState]
"""States by key. Snapshots of several shards can be merged and distributed again."""


@dataclass(slots=True)
class KeyEntry:
    """One key's state; ranks are those of live workers.

    Attributes:
        tensors: The parameters of the key's bucket.
        parts: The parameters with elements in the key's slice.
        contributions: The open round, by rank.
        covered: What covers other ranks of the open round, by the covered rank.
        readers: Workers whose push is over, and which wait to read.
        pullers: Workers that wait for the initial values.
        clocks: The clock of each rank's next push.
        left: The clocks of ranks that left.
        read: The version in the last reply to each rank.
        late: Ranks that joined the running job, and whose first push is not over.
        settled: The last applied or dropped push of each rank.
        writes: What scripts changed since the last step.
        drain_from: Replies with this version or a later one announce the end of the job.
        saved_at: The version that the last snapshot has; replies with it ask workers for their own state.
        codec: The codec of the gradients; None if they are uncompressed.
        coded: The compressed values for readers; None if values are sent uncompressed.
        shown: Whether workers may exchange gradients and values as locations in GPU memory.
        averages: Whether the values become the mean gradient, because the workers step.
    """

    key: int
    values: Tensor
    optimizer: BlockSteps
    tensors: tuple[TensorSpec, ...]
    parts: tuple[ParameterPart, ...]
    initialised: bool
    version: int = 0
    clocks: dict[int, int] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    contributions: dict[int, Contribution] = field(default_factory=dict)
    covered: dict[int, Contribution] = field(default_factory=dict)
    readers: dict[int, Reader] = field(default_factory=dict)
    pullers: dict[int, Reader] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    settled: dict[int, Settled] = field(default_factory=dict)
    writes: PendingWrites = field(default_factory=PendingWrites)
    drain_from: float = inf
    saved_at: int = -1
    codec: Compressor | None = None
    coded: CodedMean | None = None
    shown: bool = False
    averages: bool = False

    @classmethod
    def make(cls, piece: Slice, bucket: BucketSpec, memory: Tensor, *, finite: bool = True) -> KeyEntry:
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
        parts = parameter_parts(piece, bucket.tensors)
        ranges = [part.in_slice for part in parts]
        steps = BlockSteps(bucket.optimizer, values, finite=finite, parameters=ranges)
        entry = cls(piece.key, values, steps, bucket.tensors, parts, initialised=not bucket.optimizer)
        entry.averages = not bucket.optimizer
        entry.codec = codec_for(bucket.codec, piece.numel, dtype)
        if entry.codec is not None and not bucket.optimizer:
            entry.coded = CodedMean(entry.codec, values)
        return entry

    def gather(self, scratch: Tensor) -> Round:
        """Returns the open round, which can close; applies what scripts wrote before it.

        Args:
            scratch: At least twice as long as the values, of `optimizer.dtype`.

        Raises:
            Disagreement: The contributors' scripts changed parameters or state differently. Nothing changed.
        """
        excused = set[int]()
        added = sorted(self.contributions.keys() - self.covered.keys())
        contributions = [self.contributions[rank] for rank in added]
        count = len(added) + sum(map(len, map(_COVERS, contributions)))
        if self.writes.waiting:
            ranks = sorted(self.contributions.keys() | self.covered)
            # Of a mean, rank 0 alone restores what its compression has left out.
            excused = set(ranks) if self.averages else self.late | self._idle()
            self.apply_writes(ranks, excused)
        absent = _absent(contributions) if contributions[0].push.absent else ()
        gradients, count = self._summands(contributions, scratch, count)
        return Round(contributions, gradients, count, absent, excused)

    def apply(self, done: ClosedRound, scratch: Tensor) -> None:
        """Applies a round that this key's primary closed. `scratch` is as in `gather`."""
        if self.writes.waiting:
            self.apply_writes([one.rank for one in done.contributors], done.excused)
        self.step([done.total], done.hyper, done.absent, scratch, done.count)

    def step(
        self,
        gradients: Sequence[Tensor],
        hyper: StepHyper,
        absent: tuple[int, ...],
        scratch: Tensor,
        count: int,
    ) -> None:
        """Applies the mean of gradients.

        Args:
            gradients: In rank order, or their sum.
            hyper: The hyperparameters.
            absent: Which of `parts` have no gradient.
            scratch: As in `gather`.
            count: What the sum is divided by.

        Raises:
            NonFinite: The sum has a NaN or an infinity. The values are invalid from then on.
        """
        self.optimizer.step(gradients, hyper, scratch, frozenset(() if self.averages else absent), count)
        if self.coded is not None:
            self.coded.encode(self.values, [self.parts[index].in_slice for index in absent])
        self.version += 1

    def write(self, values: Tensor | None, state: OptimizerState | None) -> None:
        """Replaces the values, the optimizer's state, or both."""
        if values is not None:
            self.optimizer.write(values)
        if state is not None and self.coded is None:
            self.optimizer.load(state)
        elif state is not None and self.coded is not None:
            self.coded.residual.copy_(state.tensors[RESIDUAL])

    def apply_writes(self, ranks: Sequence[int], excused: Collection[int] = ()) -> None:
        """Applies what these ranks wrote since the last step, and drops what others wrote.

        The `excused` agree with whatever the others wrote, unless they wrote too.

        Raises:
            Disagreement: They wrote different parameters or states. Nothing changed.
        """
        self.write(*self.writes.agreed(ranks, self.values, excused))
        self.writes.clear()

    def _idle(self) -> set[int]:
        """Returns the contributors without any gradient, such as a rank that is in `join()`.

        If no contributor has one, they are not idle: the step does not use the slice's parameters.
        """
        whole, everyone = len(self.parts), self.contributions | self.covered
        idle = {rank for rank, one in everyone.items() if len(one.push.absent) == whole}
        return idle if len(idle) < len(everyone) else set()

    def parameter_at(self, index: int) -> TensorSpec:
        """Returns the parameter that contains one element of the values."""
        return next(self.tensors[part.position] for part in self.parts if index < part.in_slice.stop)

    def _summands(
        self, contributions: Sequence[Contribution], scratch: Tensor, count: int
    ) -> tuple[list[Tensor], int]:
        """Returns gradients and what their sum is divided by; of compressed or weighted ones the mean."""
        gradients = list(map(attrgetter("gradient"), contributions))  # the store refuses the other form
        weights = list(map(_WEIGHT, contributions))
        weighted = weights.count(None) < len(weights) > 1
        if self.codec is None and not weighted:
            return gradients, count
        mean, spare = scratch[: self.values.numel()], scratch[self.values.numel() :]
        if weighted:
            compressor.weighted_mean_into(mean, self.codec, gradients, spare, weights, count)
        elif self.codec is not None:
            compressor.mean_into(mean, self.codec, gradients, spare, count)
        return [mean], 1

    def settle(self, push: Push, tickets: list[Ticket], settled: Settled) -> None:
        """Records that a push is over and that its sender now waits to read."""
        self.settled[push.sender.rank] = settled
        self.late.discard(push.sender.rank)
        self.readers[push.sender.rank] = self.reader_after(push, tickets, settled)

    def note_settled(self, rank: int, settled: Settled) -> None:
        """Records that a rank's push is over and that the rank has read the values, or will push again."""
        self.settled[rank] = settled
        self.late.discard(rank)
        self.read[rank] = self.version

    def reader_after(self, push: Push, tickets: list[Ticket], settled: Settled) -> Reader:
        """Returns the sender of a push that is over."""
        shown = self.shown and is_placed(push.gradient)
        return Reader(push.sender, tickets, push.clock + 1, settled.staleness, shown, settled.absent)

    def forget(self, ranks: Iterable[int]) -> list[Ticket]:
        """Removes ranks; returns the tickets of their unanswered requests."""
        waiting: list[Contribution | Reader] = []
        for rank in ranks:
            for table in (self.contributions, self.readers, self.pullers):
                if rank in table:
                    waiting.append(table.pop(rank))
            if self.covered:
                self.covered = {
                    other: one
                    for other, one in self.covered.items()
                    if rank not in (other, one.push.sender.rank)
                }
            self.read.pop(rank, None)
            self.late.discard(rank)
            self.settled.pop(rank, None)
            self.writes.forget(rank)
        return [ticket for waiter in waiting for ticket in waiter.tickets]

    def retain(self, ranks: Collection[int]) -> None:
        """Drops the clocks of all other ranks; a checkpoint still has them."""
        self.left.update(self.clocks)
        self.clocks = {rank: clock for rank, clock in self.clocks.items() if rank in ranks}

    def waiting(self) -> Collection[int]:
        """Returns the ranks with unanswered requests."""
        return self.contributions.keys() | self.readers.keys() | self.pullers.keys()

    def export(self) -> KeyState:
        """Returns a copy of the state for a checkpoint.

        A rank that left resumes where it left, or with the slowest live rank if that is further.
        """
        state = self.optimizer.state().on_host().saved()
        slowest = min(self.clocks.values(), default=0)
        clocks = {rank: max(clock, slowest) for rank, clock in self.left.items()} | self.clocks
        return KeyState(self.values.to("cpu", copy=True), state, self.version, clocks)

    def restore(self, saved: KeyState) -> None:
        """Restores a state from `export`.

        Raises:
            CheckpointCorrupt: The state has another size or dtype.
        """
        state = OptimizerState.from_saved(saved.optimizer, len(self.parts))
        if (saved.values.shape, saved.values.dtype) != (self.values.shape, self.values.dtype) or self.misfit(
            state
        ):
            raise CheckpointCorrupt(
                f"the checkpoint holds {saved.values.dtype}{list(saved.values.shape)} for key {self.key},"
                f" expected {self.values.dtype}{list(self.values.shape)}; another job wrote this checkpoint"
            )
        self.write(saved.values, state)
        self.version, self.clocks, self.left = saved.version, dict(saved.clocks), {}
        self.initialised = True

    def state(self) -> OptimizerState:
        """Returns the optimizer's state; of a compressed mean, what the codec has left out so far."""
        return self.optimizer.state() if self.coded is None else self.coded.state

    def misfit(self, state: OptimizerState) -> str:
        """Returns why an optimizer's state does not fit this slice, as a clause; empty if it does."""
        if self.coded is not None:
            mine, theirs = self.coded.residual, state.tensors.get(RESIDUAL)
            fits = theirs is not None and (theirs.shape, theirs.dtype) == (mine.shape, mine.dtype)
            return "" if fits else f"expected a {RESIDUAL} of {mine.numel()} elements in {mine.dtype}"
        for name, tensor in state.tensors.items():
            expected = [len(self.parts)] if name == STEP else list(self.values.shape)
            if list(tensor.shape) != expected:
                return f"{name} has shape {list(tensor.shape)}, expected {expected}"
            kept = state_dtype(self.values.dtype)  # or, in an older checkpoint, that of the values
            if name != STEP and tensor.dtype not in (kept, self.values.dtype):
                return f"{name} has {tensor.dtype}, expected {kept}"
        if state.tensors and not set(state.fresh) <= set(range(len(self.parts))):
            return f"the parameters {list(state.fresh)} are fresh, but the slice has {len(self.parts)}"
        return self.optimizer.misfit(state)


_COVERS = attrgetter("push.covers")
_WEIGHT = attrgetter("push.weight")


def _absent(contributions: Sequence[Contribution]) -> tuple[int, ...]:
    """Returns which of the slice's parameters have no gradient in any push of a round, in ascending order."""
    first, *others = (contribution.push.absent for contribution in contributions)
    return tuple(sorted(set(first).intersection(*others)))

"""The model that a job's workers and its checkpoint agree on, and the plan of its slices.

Law: the first worker's buckets become the job's. They must match the restored
checkpoint, and all other workers must have the same. Buckets can join later: their
indices and keys follow those of the job, so the plan only grows. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from hubring.ps.checkpoint.checkpoint_folder import Manifest
from hubring.ps.coordinator.checkpoints import CheckpointContent
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import DTYPE_BYTES, BucketSpec, ShardPlan, Slice, Slicing
from hubring.ps.job.control_messages import model_difference
from hubring.ps.job.job import Job
from hubring.ps.job.sharding import MAX_SLICES, SLICE_BYTES, deal, loads_of, number_of_slices
from hubring.ps.job.sharding import plan as make_plan
from hubring.ps.store.consistency import Consistency

Buckets = tuple[BucketSpec, ...]


class _Saved(NamedTuple):
    """What a checkpoint has of some buckets."""

    path: Path
    buckets: Buckets
    slices: tuple[Slice, ...]


@dataclass(eq=False, repr=False)
class ModelState:
    """What another process needs to know of a job's model."""

    slicing: Slicing
    restored: tuple[Path, Manifest] | None
    buckets: Buckets = ()
    plan: ShardPlan = ShardPlan(())  # noqa: RUF009 - it does not change
    settled: bool = False
    """Whether the shards have the plan."""
    joined: tuple[int, ...] = ()
    """The numbers of buckets that joined together, in order."""
    trial: int = 0
    """The number of the trial whose plan the shards have; 0 before the first."""


class AgreedModel(ModelState):
    """The model that the job trains; empty until the first worker has sent its buckets.

    Args:
        consistency: The hub's policy; `--aggregate` needs lockstep.
        mode: The policy's name, for messages.
        slice_bytes: Largest slice; None uses the checkpoint's slices, or else the workers' choice.
        restored: The checkpoint to resume from, if there is one.
    """

    def __init__(
        self,
        consistency: Consistency,
        mode: str,
        slice_bytes: int | None,
        restored: tuple[Path, Manifest] | None,
    ) -> None:
        super().__init__(Slicing(slice_bytes or SLICE_BYTES), restored)
        self._consistency, self._mode, self._slice_bytes = consistency, mode, slice_bytes

    @property
    def undecided(self) -> bool:
        """Whether the workers choose the slices and have not chosen yet."""
        return self._slice_bytes is None and self.restored is None and not self.settled

    @property
    def lockstep(self) -> bool:
        """Whether each step takes one push from each worker."""
        return self._consistency.lockstep

    @property
    def step(self) -> int:
        """Completed steps at the start of the job."""
        return self.restored[1].step if self.restored else 0

    @property
    def on_the_hub(self) -> bool:
        """Whether the shards hold parameters. With `--aggregate` they only average gradients."""
        return self.settled and bool(self.buckets) and _steps_on_hub(self.buckets)

    def check(self, offered: Buckets, late: bool) -> None:
        """Compares a worker's buckets with the job's.

        Raises:
            ConfigError: The buckets differ, or the hub cannot serve them.
        """
        if late and not (_steps_on_hub(offered) and _steps_on_hub(self.buckets)):
            raise ConfigError(
                "the hub only averages in this job, as the workers asked (--aggregate) or because it cannot"
                " step as the script asks, so no worker can join after the start; restart the job with all"
                " its workers"
            )
        if not self.lockstep and not _steps_on_hub(offered):
            raise ConfigError(
                f"--aggregate needs a synchronous hub, but this server runs --mode {self._mode};"
                " restart the server with --mode bsp"
            )
        if self.extends(offered):
            self._check_new(offered)
        held = _counterpart(offered, self.buckets, self.joined)
        clause = model_difference(held, offered) if held else None
        if clause is not None:
            raise ConfigError(
                f"this worker's model differs from the job's: {clause}; start all workers with the same"
                " script, arguments and flags"
            )

    def turns_to_averaging(self, offered: Buckets) -> bool:
        """Returns whether the workers have found that the hub, which steps, must average."""
        return self.on_the_hub and bool(offered) and not _first(offered) and not _steps_on_hub(offered)

    def forget(self) -> None:
        """Forgets the buckets, so that the workers can agree on others."""
        self.buckets, self.plan, self.joined, self.settled = (), ShardPlan(()), (), False

    def draw_trial(
        self, offered: Buckets, shards: int, slice_bytes: int, number: int
    ) -> tuple[ShardPlan, int]:
        """Returns a plan for a trial, and how many later trials have begun; less than 0 if it is new.

        The chosen slices count as a trial too.

        Raises:
            ConfigError: The job already has its plan, or the slices are too many.
        """
        if number > self.trial and not self.undecided:
            raise ConfigError("the job already has its slices; no worker can try other slices")
        return self._cut(offered, shards, Slicing(slice_bytes)), self.trial - number or int(self.settled)

    def extends(self, offered: Buckets) -> bool:
        """Returns whether these buckets join those of the job."""
        return self.settled and _first(offered) > 0 and _first(offered) >= len(self.buckets)

    def initialised(self, offered: Buckets) -> bool:
        """Returns whether the shards have values for these buckets from a checkpoint."""
        return self._saved(offered) is not None

    def draw(
        self, offered: Buckets, shards: int, slicing: Slicing | None = None
    ) -> tuple[ShardPlan, Path | None]:
        """Returns the plan for the first worker's buckets, and the checkpoint that holds them, if one does.

        Without a configured slice size, a restored job uses the slices of its checkpoint.

        Args:
            offered: The buckets: those of the job's start, or some that join.
            shards: How many shards there are.
            slicing: What the workers chose, if the choice was theirs.

        Raises:
            ConfigError: The checkpoint belongs to another model, or the slices are too many.
        """
        if self._slice_bytes is None and slicing is not None:
            self.slicing = slicing
        saved = self._saved(offered)
        if saved is not None and self._slice_bytes is None:
            plan = deal(saved.slices, offered, shards, loads_of(self.plan, self.buckets, shards))
        else:
            plan = self._cut(offered, shards, self.slicing)
        if saved is None:
            return plan, None
        clause = model_difference(_uncoded(saved.buckets), _uncoded(offered))
        if clause is None and _cuts(saved.slices) != _cuts(plan.slices):
            clause = "--slice-bytes has changed"
        if clause is not None:
            raise ConfigError(
                f"this worker's model does not match the checkpoint {saved.path}: {clause}."
                " Restart the server with another --checkpoint-dir, or start the job that wrote the"
                " checkpoint"
            )
        return plan, saved.path

    def _cut(self, offered: Buckets, shards: int, slicing: Slicing) -> ShardPlan:
        used, first = min(slicing.shards or shards, shards), len(self.plan.slices)
        count = first + number_of_slices(offered, slicing.slice_bytes)
        if count > MAX_SLICES:
            nbytes = sum(bucket.numel * DTYPE_BYTES[bucket.dtype] for bucket in offered)
            least = nbytes // max(1, MAX_SLICES - first - len(offered))
            raise ConfigError(
                f"slices of at most {slicing.slice_bytes} bytes cut this model into {count} slices, but a job"
                f" has at most {MAX_SLICES}; restart the server with --slice-bytes {1 << least.bit_length()}"
            )
        return make_plan(offered, used, slicing.slice_bytes, loads_of(self.plan, self.buckets, used), first)

    def _saved(self, offered: Buckets) -> _Saved | None:
        """Returns what the checkpoint has in place of these buckets; None if they are new."""
        if self.restored is None:
            return None
        path, manifest = self.restored
        buckets = _counterpart(offered, manifest.buckets, manifest.joined)
        indices = {bucket.index for bucket in buckets}
        slices = tuple(piece for piece in manifest.slices if piece.bucket in indices)
        return _Saved(path, buckets, slices) if buckets else None

    def _check_new(self, offered: Buckets) -> None:
        """Checks buckets that join the job.

        Raises:
            ConfigError: They are not the next ones, or have a parameter of the job.
        """
        if _first(offered) != len(self.buckets):
            raise ConfigError(
                f"buckets from index {_first(offered)} cannot join this job of {len(self.buckets)} buckets;"
                " add the same groups of parameters in the same order on every worker"
            )
        known = {tensor.name for bucket in self.buckets for tensor in bucket.tensors}
        again = [tensor.name for bucket in offered for tensor in bucket.tensors if tensor.name in known]
        if again:
            raise ConfigError(f"parameter {again[0]} is in the job already; add each parameter to one group")

    def expect(self, offered: Buckets) -> None:
        """Makes these the job's buckets before there is a plan, so that all ranks try the same model."""
        self.buckets = self.buckets or offered

    def settle(self, offered: Buckets, plan: ShardPlan) -> None:
        """Makes these the job's buckets and plan, or adds them, once the shards have them."""
        self.buckets = (*self.buckets, *offered) if self.settled else offered
        self.plan = ShardPlan((*self.plan.slices, *plan.slices))
        self.joined = (*self.joined, len(offered))
        self.settled = True

    def checkpoint_content(self, job: Job) -> CheckpointContent:
        """Returns what a checkpoint must save.

        Raises:
            ConfigError: The shards hold no parameters.
        """
        if not self.on_the_hub or job.membership is None:
            raise ConfigError(
                "the shards hold no parameters: no worker has sent any yet, or the workers use --aggregate"
            )
        manifest = Manifest(
            job=job.name,
            mode=self._mode,
            step=0,
            next_incarnation=job.membership.next_incarnation,
            buckets=self.buckets,
            slices=self.plan.slices,
            files=(),
            joined=self.joined,
        )
        return CheckpointContent(
            manifest,
            lockstep=self.lockstep,
            together=self.lockstep and not self._consistency.backup,
            running=not job.over,
            ranks=job.membership.active,
        )


def _steps_on_hub(buckets: Buckets) -> bool:
    return all(bucket.optimizer for bucket in buckets)


def _first(offered: Buckets) -> int:
    return offered[0].index if offered else 0


def _counterpart(offered: Buckets, held: Buckets, joined: Sequence[int]) -> Buckets:
    """Returns the held buckets that these must equal: those that joined with the first of them, or all.

    Args:
        offered: A worker's buckets.
        held: All buckets of a job or a checkpoint.
        joined: The numbers of buckets that joined together, in order; empty: all.
    """
    first = _first(offered)
    if not first and len(offered) == len(held):
        return held
    end = next((end for end in accumulate(joined) if end > first), len(held))
    return held[first:end]


def _uncoded(buckets: Buckets) -> Buckets:
    """Returns the buckets without codecs: a resumed job may use another compression."""
    return tuple(replace(bucket, codec="") for bucket in buckets)


def _cuts(slices: Sequence[Slice]) -> list[tuple[int, int, int, int]]:
    """Returns the slices without shards: a resumed job may have another number of shards."""
    return [(piece.key, piece.bucket, piece.offset, piece.numel) for piece in slices]

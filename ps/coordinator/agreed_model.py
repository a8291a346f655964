"""The model that a job's workers and its checkpoint agree on, and the plan of its slices.

Law: the first worker's buckets become the job's. They must match the restored
checkpoint, and all other workers must have the same. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hubring.ps.checkpoint.checkpoint_folder import Manifest
from hubring.ps.coordinator.checkpoint_publisher import Held
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import BucketSpec, ShardPlan, Slice, Slicing
from hubring.ps.job.job import Job
from hubring.ps.job.plan_protos import difference
from hubring.ps.job.sharding import SLICE_BYTES, deal
from hubring.ps.job.sharding import plan as make_plan
from hubring.ps.store.consistency import Consistency

Buckets = tuple[BucketSpec, ...]


class AgreedModel:
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
        self.buckets: Buckets = ()
        self.plan = ShardPlan(())
        self.settled = False
        """Whether the shards have the plan."""
        self.restored = restored
        self._consistency = consistency
        self._mode = mode
        self._slice_bytes = slice_bytes
        self._trial: tuple[Buckets, int] | None = None

    @property
    def undecided(self) -> bool:
        """Whether the workers choose the slices and have not chosen yet."""
        return self._slice_bytes is None and self.restored is None and not self.settled

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
        if late and not _steps_on_hub(offered):
            raise ConfigError(
                "with --aggregate no worker can join after the start, because the hub holds no parameters."
                " Restart the job with all its workers"
            )
        if not self._consistency.lockstep and not _steps_on_hub(offered):
            raise ConfigError(
                f"--aggregate needs a synchronous hub, but this server runs --mode {self._mode};"
                " restart the server with --mode bsp"
            )
        clause = difference(self.buckets, offered) if self.buckets else None
        if clause is not None:
            raise ConfigError(
                f"this worker's model differs from the job's: {clause}; start all workers with the same"
                " script, arguments and flags"
            )

    def draw_trial(self, offered: Buckets, shards: int, slice_bytes: int) -> tuple[ShardPlan, bool]:
        """Returns a plan for a trial, and whether it differs from the last trial's plan.

        Raises:
            ConfigError: The job already has its plan.
        """
        if not self.undecided:
            raise ConfigError("the job already has its slices; no worker can try other slices")
        asked = (offered, slice_bytes)
        is_new, self._trial = asked != self._trial, asked
        return make_plan(offered, shards, slice_bytes), is_new

    def draw(self, offered: Buckets, shards: int, slicing: Slicing | None = None) -> ShardPlan:
        """Returns the plan for the first worker's buckets.

        Without a configured slice size, a restored job uses the slices of its checkpoint.

        Args:
            offered: The buckets.
            shards: How many shards there are.
            slicing: What the workers chose, if the choice was theirs.

        Raises:
            ConfigError: The checkpoint belongs to another model.
        """
        if self.restored is not None and self._slice_bytes is None:
            plan = deal(self.restored[1].slices, offered, shards)
        else:
            asked = Slicing(self._slice_bytes) if self._slice_bytes else slicing or Slicing(SLICE_BYTES)
            plan = make_plan(offered, min(asked.shards or shards, shards), asked.slice_bytes)
        if self.restored is not None:
            path, manifest = self.restored
            clause = difference(_uncoded(manifest.buckets), _uncoded(offered))
            if clause is None and _cuts(manifest.slices) != _cuts(plan.slices):
                clause = "--slice-bytes has changed"
            if clause is not None:
                raise ConfigError(
                    f"this worker's model does not match the checkpoint {path}: {clause}."
                    " Restart the server with another --checkpoint-dir, or start the job that wrote the"
                    " checkpoint"
                )
        return plan

    def expect(self, offered: Buckets) -> None:
        """Makes these the job's buckets before there is a plan, so that all ranks try the same model."""
        self.buckets = self.buckets or offered

    def settle(self, offered: Buckets, plan: ShardPlan) -> None:
        """Makes these the job's buckets and plan, once the shards have them."""
        self.buckets, self.plan, self.settled = offered, plan, True

    def held(self, job: Job, next_incarnation: int) -> Held:
        """Returns what a checkpoint must save.

        Raises:
            ConfigError: The shards hold no parameters.
        """
        if not self.on_the_hub:
            raise ConfigError(
                "the shards hold no parameters: no worker has sent any yet, or the workers use --aggregate"
            )
        return Held(
            job.name,
            self._mode,
            self.buckets,
            self.plan,
            next_incarnation,
            lockstep=self._consistency.lockstep,
            running=not job.over,
            step=job.step,
        )


def _steps_on_hub(buckets: Buckets) -> bool:
    return all(bucket.optimizer for bucket in buckets)


def _uncoded(buckets: Buckets) -> Buckets:
    """Returns the buckets without codecs: a resumed job may use another compression."""
    return tuple(replace(bucket, codec="") for bucket in buckets)


def _cuts(slices: Sequence[Slice]) -> list[tuple[int, int, int, int]]:
    """Returns the slices without shards: a resumed job may have another number of shards."""
    return [(piece.key, piece.bucket, piece.offset, piece.numel) for piece in slices]

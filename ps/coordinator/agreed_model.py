"""The one model that a job's workers and its checkpoint agree on, and where its slices lie.

Law: the first worker's buckets are the job's, if they fit the checkpoint to go
on from; everybody else's must be the same. No I/O.
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
    """What the job trains; empty until the first worker has said it.

    Args:
        consistency: What the hub promises; aggregate-only needs its lockstep.
        mode: The policy's name, for messages.
        slice_bytes: Largest slice; None leaves it to the checkpoint, or else to the workers.
        restored: The checkpoint to go on from, if there is one.
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
        """The shards have the plan."""
        self.restored = restored
        self._consistency = consistency
        self._mode = mode
        self._slice_bytes = slice_bytes
        self._trial: tuple[Buckets, int] | None = None

    @property
    def undecided(self) -> bool:
        """Whether the workers are to say how the model is cut, and have not yet."""
        return self._slice_bytes is None and self.restored is None and not self.settled

    @property
    def step(self) -> int:
        """Completed steps that the job begins with."""
        return self.restored[1].step if self.restored else 0

    @property
    def on_the_hub(self) -> bool:
        """Whether the shards hold parameters, rather than only average gradients."""
        return self.settled and bool(self.buckets) and _steps_on_hub(self.buckets)

    def check(self, offered: Buckets, late: bool) -> None:
        """Holds a worker's buckets against the job's.

        Raises:
            ConfigError: They differ, or cannot be served; names the first difference.
        """
        if late and not _steps_on_hub(offered):
            raise ConfigError(
                "under --aggregate the hub holds no parameters to give to a worker that comes late:"
                " start the job again with all of its workers"
            )
        if not self._consistency.lockstep and not _steps_on_hub(offered):
            raise ConfigError(
                f"--aggregate needs a synchronous hub; this one runs --mode {self._mode}:"
                " start it with --mode bsp"
            )
        clause = difference(self.buckets, offered) if self.buckets else None
        if clause is not None:
            raise ConfigError(
                f"this worker trains otherwise than the job: it has {clause}; start all workers with the same"
                " script, arguments and flags"
            )

    def draw_trial(self, offered: Buckets, shards: int, slice_bytes: int) -> tuple[ShardPlan, bool]:
        """A plan that is only to be tried, and whether it is another than the one tried last.

        Raises:
            ConfigError: The job has its plan already.
        """
        if not self.undecided:
            raise ConfigError("the job has its slices already: a worker that joins it has nothing to try")
        asked = (offered, slice_bytes)
        is_new, self._trial = asked != self._trial, asked
        return make_plan(offered, shards, slice_bytes), is_new

    def draw(self, offered: Buckets, shards: int, slicing: Slicing | None = None) -> ShardPlan:
        """The plan for the first worker's buckets; a checkpoint's own cuts if nobody asks for others.

        Args:
            offered: The buckets.
            shards: How many shards there are.
            slicing: What the workers found best, if that was left to them.

        Raises:
            ConfigError: The checkpoint is of another model.
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
                clause = "slices cut by another --slice-bytes"
            if clause is not None:
                raise ConfigError(
                    f"the checkpoint {path} is of another model: this worker has {clause}."
                    " Start the server with another --checkpoint-dir, or the job that it belongs to"
                )
        return plan

    def expect(self, offered: Buckets) -> None:
        """Makes these the job's before there is a plan: what ranks try together must be one model."""
        self.buckets = self.buckets or offered

    def settle(self, offered: Buckets, plan: ShardPlan) -> None:
        """Makes these the job's: the shards have them."""
        self.buckets, self.plan, self.settled = offered, plan, True

    def held(self, job: Job, next_incarnation: int) -> Held:
        """What there is to save of it.

        Raises:
            ConfigError: There is nothing.
        """
        if not self.on_the_hub:
            raise ConfigError("the shards hold no parameters: no worker has brought any yet")
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
    """What gradients are compressed with may change from start to start."""
    return tuple(replace(bucket, codec="") for bucket in buckets)


def _cuts(slices: Sequence[Slice]) -> list[tuple[int, int, int, int]]:
    """Everything about slices but the shard, which may change from start to start."""
    return [(piece.key, piece.bucket, piece.offset, piece.numel) for piece in slices]

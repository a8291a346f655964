"""Checkpoints of a job whose workers step: on a ring, with --aggregate, or without a server.

A hub that steps saves its own checkpoints. Otherwise every rank has the same parameters and optimizer
state, so rank 0 writes them to DIR/workers in the format of `ps/checkpoint/checkpoint_folder.py`. At the
start rank 0 reads the file and broadcasts it. The other ranks need no access to the folder.

Buffers and the residuals of compression differ by rank, so the other ranks send theirs to rank 0
(`hubring.workers.optimizer.own_state`). All ranks must do so after the same step, and rank 0 alone watches
the time: it says at each of these steps, which become closer, when the next one is. No other step costs
anything.

Invariants: a checkpoint holds one completed step, the same on all ranks. When a job is stopped, no rank
leaves before the checkpoint is saved. Not restored: hyperparameters (as on a hub, the script sets them), and
the script's random state.
"""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path

import torch
from torch import Tensor

from hubring.ps.checkpoint import checkpoint_folder
from hubring.ps.checkpoint.checkpoint_folder import (
    OF_WORKERS,
    FileEntry,
    Manifest,
    lock_directory,
    newest_step,
    with_age,
)
from hubring.ps.core.errors import ConfigError, HubringError
from hubring.workers import collectives
from hubring.workers.collectives.moving import broadcast_into
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer import own_state
from hubring.workers.optimizer.saved_state import (
    Saved,
    Trained,
    describe_state,
    prepare_state,
    read_file,
    restore_state,
    tensor_kind,
    write_file,
)
from hubring.workers.runtime import training_record

log = logging.getLogger(__name__)

MODE = "workers"
_FILE = "rank-0.safetensors"
MOST_STEPS = 256
"""Steps after which the ranks look again whether a checkpoint is due, at most: steps can become slower."""


class Checkpoints:
    """Saves and restores on rank 0. All ranks must call `share` and `save_together`.

    Args:
        directory: `--checkpoint-dir`.
        every: Seconds between periodic checkpoints.
        communicator: Connects the ranks.
        job: Name of the script, for the manifest.

    Raises:
        ConfigError: Rank 0 cannot read or write the folder, or another job uses it.
    """

    def __init__(self, directory: Path, every: float, communicator: Communicator, job: str) -> None:
        self._directory = directory / OF_WORKERS
        self._every = every
        self._communicator = communicator
        self._job = job
        self._lock = lock_directory(self._directory) if communicator.rank == 0 else None
        self._folder: Path | None = None
        """The checkpoint that rank 0 has found."""
        self._found = self._read() if communicator.rank == 0 else []
        self._trained: list[Trained] = []
        self._saved_at = time.monotonic()
        self._tried: tuple[int, HubringError | None] = (-1, None)
        """The last step whose checkpoint was tried, and why it failed."""
        self.due_at: float = 0
        """The step after which to call `save_in_passing`."""
        # A ring that heals has no residuals, and its newcomers would not know when all look.
        self._asks_all = communicator.size > 1 and communicator.members is None
        self._looked = (0.0, 0)

    def adopt(self, trained: Trained) -> None:
        """Saves an optimizer from now on, in the place of an earlier one of the same parameters."""
        place = self._place_of(trained)
        self._trained[place : place + 1] = [trained]

    def load(self, trained: Trained) -> None:
        """Loads the model state saved for a new optimizer, on rank 0, before the ranks compare their models.

        Raises:
            ConfigError: The checkpoint is of another model. The error names the first difference.
        """
        saved = self._saved_of(trained)
        if saved is None:
            return
        here = trained.model_state
        for name in [*here, *saved.tensors]:
            mine, theirs = (tensor_kind(part.get(name)) for part in (here, saved.tensors))
            if mine != theirs:
                raise ConfigError(
                    f"the checkpoint in {self._directory} is of another model: {name!r} is {theirs} in the"
                    f" checkpoint and {mine} in this model; use another --checkpoint-dir or the same script"
                )
        with torch.no_grad():
            for name, tensor in here.items():
                tensor.copy_(saved.tensors[name])

    def share(self, trained: Trained) -> int:
        """Broadcasts the optimizer state that rank 0 has saved for a new optimizer; all ranks must call it.

        Returns:
            The completed steps of the checkpoint; 0 without one.
        """
        saved = self._saved_of(trained)
        description = describe_state(saved) if saved is not None else b""
        own = torch.tensor(list(description), dtype=torch.uint8, device="cpu")
        # An allgather, because only rank 0 knows the length; the other ranks add no bytes.
        gathered = collectives.allgather(own, "checkpoint", communicator=self._communicator)
        if not gathered.numel():
            return 0
        saved = saved or prepare_state(bytes(gathered.tolist()))
        for index, values in saved.state.items():
            tensors = [value for value in values.values() if isinstance(value, Tensor)]
            name = f"checkpoint.{index}"
            broadcast_into(tensors, self._communicator, name, self._communicator.timeout)
        restore_state(trained, saved)
        own_state.deal(self._own, trained.rest, len(self._trained), self._communicator)
        return saved.step

    def save_in_passing(self) -> None:
        """Saves a periodic checkpoint if it is time. Logs a ConfigError and retries at the next due time."""
        if not self._is_time():
            return
        try:
            self.save()
        except ConfigError as error:
            log.error("checkpoint not saved: %s; the previous checkpoint is still valid", error)
            self._saved_at = time.monotonic()

    def _is_time(self) -> bool:
        """Returns whether to save now, on all ranks alike; sets when to look again."""
        now, step = time.monotonic(), self._step
        left = self._every - (now - self._saved_at)
        if not self._asks_all:
            return self._communicator.rank == 0 and left <= 0
        (since, before), self._looked = self._looked, (now, step)
        ahead = 0
        if left > 0:  # half of the way, as steps took until now
            ahead = int(left * (step - before) / max(now - since, 1e-9) / 2) if since else 1
            ahead = min(max(ahead, 1), MOST_STEPS)
        own = torch.tensor([ahead], device="cpu")
        ahead = int(collectives.broadcast(own, 0, "checkpoint.ahead", communicator=self._communicator))
        self.due_at = step + max(ahead, 1)
        return ahead == 0

    def save(self) -> None:
        """Writes a checkpoint of the last completed step. The other ranks send rank 0 their own state.

        Raises:
            ConfigError: The folder is not writable, or an optimizer's state cannot be stored.
            NonFinite: A parameter is NaN or infinite. The previous checkpoint stays valid.
        """
        if not self._trained:
            return
        step, failure = self._tried
        if self._step == step:  # the other ranks send their state of a step once, even if rank 0 fails
            if failure is not None:
                raise failure
            return
        self._tried = (self._step, None)
        try:
            self._write(self._step)
        except HubringError as error:
            self._tried = (self._step, error)
            raise

    @property
    def _step(self) -> int:
        """Completed steps, of the optimizer that has taken most."""
        return max(trained.completed_steps for trained in self._trained)

    def _write(self, step: int) -> None:
        for trained in self._trained:
            trained.settle()
        owns = own_state.gather([trained.rest for trained in self._trained], step, self._communicator)
        if self._communicator.rank != 0:
            return
        folder = None
        try:
            if self._lock is None:  # this worker has become rank 0 of a ring
                self._lock = lock_directory(self._directory)
            training_record.check_finite(self._trained, 0, step)
            folder = checkpoint_folder.begin(self._directory)
            for rank, content in owns:
                (folder / _own_file(rank)).write_bytes(content)
                checkpoint_folder.sync(folder / _own_file(rank))
            path = folder / _FILE
            write_file(path, self._trained)
            checkpoint_folder.sync(path)
            entries = tuple(
                FileEntry(one.name, checkpoint_folder.digest(one), one.stat().st_size, ())
                for one in sorted(folder.iterdir())
            )
            final = checkpoint_folder.publish(folder, Manifest(self._job, MODE, step, 0, (), (), entries))
        except BaseException as error:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise ConfigError(f"cannot write a checkpoint to {self._directory}: {error}") from error
            raise
        finally:
            for _ in owns:  # the other ranks wait until rank 0 has their state
                pass
        self._saved_at = time.monotonic()
        log.info("checkpoint of step %d in %s", step, final)

    def save_together(self) -> None:
        """Saves, and returns on every rank only once it is saved.

        A launcher may stop all ranks when the first one exits.
        """
        self.save()
        collectives.barrier("checkpoint", communicator=self._communicator)

    def _own(self, rank: int) -> bytes:
        path = self._folder / _own_file(rank) if self._folder is not None else None
        return path.read_bytes() if path is not None and path.exists() else b""

    def close(self) -> None:
        """Releases the folder."""
        if self._lock is not None:
            self._lock.close()

    def _saved_of(self, trained: Trained) -> Saved | None:
        place = self._place_of(trained)
        # A later optimizer of the same parameters continues as they are.
        is_first = place == len(self._trained)
        return self._found[place] if is_first and place < len(self._found) else None

    def _place_of(self, trained: Trained) -> int:
        own = set(map(id, trained.named_parameters.values()))
        for place, earlier in enumerate(self._trained):
            if own.issuperset(map(id, earlier.named_parameters.values())):  # the script made a new one
                return place
        return len(self._trained)

    def _read(self) -> list[Saved]:
        newest = checkpoint_folder.newest(self._directory)
        if newest is None:
            if (step := newest_step(self._directory.parent)) is not None:
                log.warning(
                    "training starts at step 0: the checkpoint of step %d in %s is a hub's that steps itself."
                    " Train without --topology ring and --aggregate, or use another --checkpoint-dir",
                    step,
                    self._directory.parent,
                )
            return []
        folder, manifest = newest
        self._folder = folder
        log.info("continuing from step %d: %s", manifest.step, with_age(folder))
        return read_file(folder / _FILE)


def _own_file(rank: int) -> str:
    return f"own-{rank}.pt"

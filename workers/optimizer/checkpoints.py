"""Checkpoints of a job whose workers step: on a ring, with --aggregate, or without a server.

A hub that steps saves its own checkpoints. Otherwise every rank has the same parameters and optimizer
state, so rank 0 writes them to DIR/workers in the format of `ps/checkpoint/checkpoint_folder.py`. At the
start rank 0 reads the file and broadcasts it. The other ranks need no access to the folder.

Invariants: a checkpoint holds one completed step, the same on all ranks. When a job is stopped, no rank
leaves before the checkpoint is saved. Not restored: hyperparameters (as on a hub, the script sets them),
the residuals of gradient compression, and the script's random state.
"""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path

import torch
from torch import Tensor

from hubring.ps.checkpoint import checkpoint_folder
from hubring.ps.checkpoint.checkpoint_folder import OF_WORKERS, FileEntry, Manifest
from hubring.ps.checkpoint.lock import lock
from hubring.ps.core.errors import ConfigError
from hubring.workers import collectives
from hubring.workers.collectives.broadcasts import broadcast_into
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer import checkpoint_file
from hubring.workers.optimizer.checkpoint_file import Saved, Trained, kind
from hubring.workers.runtime import finite

log = logging.getLogger(__name__)

MODE = "workers"
_FILE = "rank-0.safetensors"


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
        self._lock = lock(self._directory) if communicator.rank == 0 else None
        self._found = self._read() if communicator.rank == 0 else []
        self._trained: list[Trained] = []
        self._saved_at = time.monotonic()
        self._saved_step = -1

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
            mine, theirs = (kind(part.get(name)) for part in (here, saved.tensors))
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
        description = checkpoint_file.described(saved) if saved is not None else b""
        own = torch.tensor(list(description), dtype=torch.uint8)
        # An allgather, because only rank 0 knows the length; the other ranks add no bytes.
        gathered = collectives.allgather(own, "checkpoint", communicator=self._communicator)
        if not gathered.numel():
            return 0
        saved = saved or checkpoint_file.prepared(bytes(gathered.tolist()))
        for index, values in saved.state.items():
            tensors = [value for value in values.values() if isinstance(value, Tensor)]
            name = f"checkpoint.{index}"
            broadcast_into(tensors, self._communicator, name, self._communicator.timeout)
        checkpoint_file.restore_state(trained, saved)
        return saved.step

    @property
    def due(self) -> bool:
        """Whether it is time for a periodic checkpoint; always False on ranks other than 0."""
        return self._communicator.rank == 0 and time.monotonic() - self._saved_at >= self._every

    def save_in_passing(self) -> None:
        """Saves a periodic checkpoint. Logs a ConfigError and retries at the next due time."""
        try:
            self.save()
        except ConfigError as error:
            log.error("checkpoint not saved: %s; the previous checkpoint is still valid", error)
            self._saved_at = time.monotonic()

    def save(self) -> None:
        """Writes a checkpoint of the last completed step. Does nothing on ranks other than 0.

        Raises:
            ConfigError: The folder is not writable, or an optimizer's state cannot be stored.
            NonFinite: A parameter is NaN or infinite. The previous checkpoint stays valid.
        """
        steps = [trained.completed_steps for trained in self._trained]
        if self._communicator.rank != 0 or not steps or steps[0] == self._saved_step:
            return
        if self._lock is None:  # this worker has become rank 0 of a ring
            self._lock = lock(self._directory)
        finite.check((trained.named_parameters for trained in self._trained), 0, steps[0])
        folder = checkpoint_folder.begin(self._directory)
        try:
            path = folder / _FILE
            checkpoint_file.write(path, self._trained)
            checkpoint_folder.sync(path)
            entry = FileEntry(_FILE, checkpoint_folder.digest(path), path.stat().st_size, ())
            final = checkpoint_folder.publish(
                folder, Manifest(self._job, MODE, steps[0], 0, (), (), (entry,))
            )
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise ConfigError(f"cannot write a checkpoint to {self._directory}: {error}") from error
            raise
        self._saved_at, self._saved_step = time.monotonic(), steps[0]
        log.info("checkpoint of step %d in %s", steps[0], final)

    def save_together(self) -> None:
        """Saves, and returns on every rank only once it is saved.

        A launcher may stop all ranks when the first one exits.
        """
        self.save()
        collectives.barrier("checkpoint", communicator=self._communicator)

    def close(self) -> None:
        """Releases the folder."""
        if self._lock is not None:
            self._lock.close()

    def _saved_of(self, trained: Trained) -> Saved | None:
        place = self._place_of(trained)
        is_first = place == len(
            self._trained
        )  # a later optimizer of the same parameters continues as they are
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
            return []
        folder, manifest = newest
        log.info("continuing from step %d: %s", manifest.step, folder)
        return checkpoint_file.read(folder / _FILE)

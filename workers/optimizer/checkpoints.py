"""What rank 0 keeps of a job whose workers step themselves: around a ring, under --aggregate, or alone.

A hub saves its own. Here every rank holds the same parameters and optimizer state, so rank 0 writes them into
DIR/workers, in the format of `ps/checkpoint/checkpoint_folder.py`. At the start rank 0 reads the file and
broadcasts it: the other ranks need no access to the folder.

The law: what is saved is a whole step, the same on all ranks, and nobody leaves a job that is stopped
before it is saved. Hyperparameters are the script's and are not restored, as on a hub; nor is what codecs
left out, nor the script's own random state.
"""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path

import torch
from torch import Tensor

from hubring.ps.checkpoint import checkpoint_folder
from hubring.ps.checkpoint.checkpoint_folder import FileEntry, Manifest
from hubring.ps.checkpoint.lock import lock
from hubring.ps.core.errors import ConfigError
from hubring.workers import collectives
from hubring.workers.collectives.broadcasts import broadcast_into
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer import checkpoint_file
from hubring.workers.optimizer.checkpoint_file import Saved, Trained, kind
from hubring.workers.runtime import finite

log = logging.getLogger(__name__)

FOLDER = "workers"
MODE = "workers"
_FILE = "rank-0.safetensors"


class Checkpoints:
    """Saves and brings back, on rank 0; the other ranks take part where all must.

    Args:
        directory: `--checkpoint-dir`.
        every: Seconds from one checkpoint to the next.
        communicator: Ties the ranks together.
        job: Name of the script, for the manifest.

    Raises:
        ConfigError: Rank 0 cannot read or write there, or another job's does.
    """

    def __init__(self, directory: Path, every: float, communicator: Communicator, job: str) -> None:
        self._directory = directory / FOLDER
        self._every = every
        self._communicator = communicator
        self._job = job
        self._lock = lock(self._directory) if communicator.rank == 0 else None
        self._found = self._read() if communicator.rank == 0 else []
        self._trained: list[Trained] = []
        self._saved_at = time.monotonic()
        self._saved_step = -1

    def adopt(self, trained: Trained) -> None:
        """Takes one more optimizer in. Rank 0 overwrites its tensors with what was saved, before ranks meet.

        Raises:
            ConfigError: The checkpoint is of another model; names the first difference.
        """
        self._trained.append(trained)
        saved = self._saved_of(trained)
        if saved is None:
            return
        here = trained.model_state
        for name in [*here, *saved.tensors]:
            mine, theirs = (kind(part.get(name)) for part in (here, saved.tensors))
            if mine != theirs:
                raise ConfigError(
                    f"the checkpoint in {self._directory} is of another model: it has {theirs} as {name!r},"
                    f" where this one has {mine}. Start with another --checkpoint-dir, or the same script"
                )
        with torch.no_grad():
            for name, tensor in here.items():
                tensor.copy_(saved.tensors[name])

    def share(self, trained: Trained) -> int:
        """Gives all ranks rank 0's optimizer state; all take part. Returns the steps completed before."""
        saved = self._saved_of(trained)
        description = checkpoint_file.described(saved) if saved is not None else b""
        given = torch.tensor(list(description), dtype=torch.uint8)
        # Of any length on rank 0, of none elsewhere.
        told = collectives.allgather(given, "checkpoint", communicator=self._communicator)
        if not told.numel():
            return 0
        saved = saved or checkpoint_file.prepared(bytes(told.tolist()))
        for index, values in saved.state.items():
            tensors = [value for value in values.values() if isinstance(value, Tensor)]
            name = f"checkpoint.{index}"
            broadcast_into(tensors, self._communicator, name, self._communicator.timeout)
        trained.wrapped.load_state_dict({**trained.wrapped.state_dict(), "state": saved.state})
        return saved.step

    @property
    def due(self) -> bool:
        """Whether it is time to save in passing: rank 0 alone does, the others go on until they need it."""
        return self._communicator.rank == 0 and time.monotonic() - self._saved_at >= self._every

    def save_in_passing(self) -> None:
        """Saves as `save` does; what goes wrong is told in the log, and tried again when it is due."""
        try:
            self.save()
        except ConfigError as error:
            log.error("no checkpoint: %s; the one before stays the last", error)
            self._saved_at = time.monotonic()

    def save(self) -> None:
        """Writes a checkpoint of the step just completed; elsewhere than on rank 0 it does nothing.

        Raises:
            ConfigError: The folder cannot be written, or an optimizer's state cannot be kept.
            NonFinite: A parameter is NaN or infinite: the checkpoint before is the last good one.
        """
        steps = [trained.completed_steps for trained in self._trained]
        if self._communicator.rank != 0 or not steps or steps[0] == self._saved_step:
            return
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
        """Saves, and returns on every rank once it is saved: a launcher may end all when one leaves."""
        self.save()
        collectives.barrier("checkpoint", communicator=self._communicator)

    def close(self) -> None:
        """Leaves its folder to others."""
        if self._lock is not None:
            self._lock.close()

    def _saved_of(self, trained: Trained) -> Saved | None:
        index = self._trained.index(trained)
        return self._found[index] if index < len(self._found) else None

    def _read(self) -> list[Saved]:
        newest = checkpoint_folder.newest(self._directory)
        if newest is None:
            return []
        folder, said = newest
        log.info("going on from step %d: %s", said.step, folder)
        return checkpoint_file.read(folder / _FILE)

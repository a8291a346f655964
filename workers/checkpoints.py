"""What rank 0 keeps of a job whose workers step themselves: around a ring, under --aggregate, or alone.

A hub keeps its own. Here every rank holds the same parameters and optimizer state, so rank 0 writes its
own, in the folders and with the digests of `ps.manifest`, into DIR/workers. At the start rank 0 alone
reads, and the others get all from it: the folder need not be shared, but rank 0 must find it again.

The law: what is saved is a whole step, the same on all ranks, and nobody leaves a job that is stopped
before it is saved. Hyperparameters are the script's and are not restored, as on a hub; nor is what codecs
left out, nor the script's own random state.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from ps import manifest
from ps.errors import CheckpointCorrupt, ConfigError
from ps.manifest import FileEntry, Manifest
from workers import collectives
from workers.communicator import Communicator

log = logging.getLogger(__name__)

FOLDER = "workers"
MODE = "workers"
_FILE = "rank-0.safetensors"


class Trained(Protocol):
    """What is kept of one optimizer and its model."""

    completed_steps: int

    @property
    def kept(self) -> Mapping[str, Tensor]:
        """Parameters, buffers and frozen parameters by name; to read and to overwrite."""

    @property
    def wrapped(self) -> Optimizer:
        """The optimizer that steps here."""


@dataclass(slots=True)
class Saved:
    """One optimizer's part of a checkpoint."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[int, dict[str, Any]]
    """As in the `state` of an optimizer's `state_dict`."""


class Checkpoints:
    """Saves and brings back, on rank 0; the other ranks take part where all must.

    Args:
        directory: `--checkpoint-dir`.
        every: Seconds from one checkpoint to the next.
        communicator: Ties the ranks together.
        job: Name of the script, for the manifest.
    """

    def __init__(self, directory: Path, every: float, communicator: Communicator, job: str) -> None:
        self._directory = directory / FOLDER
        self._every = every
        self._communicator = communicator
        self._job = job
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
        kept = trained.kept
        for name in [*kept, *saved.tensors]:
            here, there = (_kind(part.get(name)) for part in (kept, saved.tensors))
            if here != there:
                raise ConfigError(
                    f"the checkpoint in {self._directory} is of another model: it has {there} as {name!r},"
                    f" where this one has {here}. Start with another --checkpoint-dir, or the same script"
                )
        with torch.no_grad():
            for name, tensor in kept.items():
                tensor.copy_(saved.tensors[name])

    def share(self, trained: Trained) -> int:
        """Gives all ranks rank 0's optimizer state; all take part. Returns the steps completed before."""
        saved = self._saved_of(trained)
        header = json.dumps(_header(saved)).encode() if saved is not None else b""
        given = torch.frombuffer(bytearray(header), dtype=torch.uint8) if header else torch.empty(0).byte()
        # Of any length on rank 0, of none elsewhere.
        told = collectives.allgather(given, "checkpoint", communicator=self._communicator)
        if not told.numel():
            return 0
        step, kinds = json.loads(bytes(told.tolist()))
        state = saved.state if saved is not None else _empty(kinds)
        for index, values in state.items():
            tensors = [value for value in values.values() if isinstance(value, Tensor)]
            name = f"checkpoint.{index}"
            collectives.broadcast_into(tensors, self._communicator, name, self._communicator.timeout)
        trained.wrapped.load_state_dict({**trained.wrapped.state_dict(), "state": state})
        return int(step)

    @property
    def due(self) -> bool:
        """Whether it is time to save in passing: rank 0 alone does, the others go on until they need it."""
        return self._communicator.rank == 0 and time.monotonic() - self._saved_at >= self._every

    def save_in_passing(self) -> None:
        """Saves as `save` does; what goes wrong is told in the log, and tried again when it is due."""
        try:
            self.save()
        except ConfigError as error:
            log.error("no checkpoint: %s", error)
            self._saved_at = time.monotonic()

    def save(self) -> None:
        """Writes a checkpoint of the step just completed; elsewhere than on rank 0 it does nothing.

        Raises:
            ConfigError: The folder cannot be written, or an optimizer's state cannot be kept.
        """
        steps = [trained.completed_steps for trained in self._trained]
        if self._communicator.rank != 0 or not steps or steps[0] == self._saved_step:
            return
        tensors, numbers = self._state()
        folder = manifest.begin(self._directory)
        try:
            path = folder / _FILE
            save_file(tensors, path, metadata={"steps": json.dumps(steps), "numbers": json.dumps(numbers)})
            manifest.sync(path)
            entry = FileEntry(_FILE, manifest.digest(path), path.stat().st_size, ())
            final = manifest.publish(folder, Manifest(self._job, MODE, steps[0], 0, (), (), (entry,)))
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(f"cannot write a checkpoint to {self._directory}: {error}") from error
        self._saved_at, self._saved_step = time.monotonic(), steps[0]
        log.info("checkpoint of step %d in %s", steps[0], final)

    def save_together(self) -> None:
        """Saves, and returns on every rank once it is saved: a launcher may end all when one leaves."""
        self.save()
        collectives.barrier("checkpoint", communicator=self._communicator)

    def _saved_of(self, trained: Trained) -> Saved | None:
        index = self._trained.index(trained)
        return self._found[index] if index < len(self._found) else None

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by `INDEX/kept/NAME` and `INDEX/state/PARAMETER/NAME`; the numbers among the state."""
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, Any] = {}
        for index, trained in enumerate(self._trained):
            tensors.update({f"{index}/kept/{name}": _own(tensor) for name, tensor in trained.kept.items()})
            for parameter, values in trained.wrapped.state_dict()["state"].items():
                for name, value in values.items():
                    key = f"{index}/state/{parameter}/{name}"
                    if isinstance(value, Tensor):
                        tensors[key] = _own(value)
                    else:
                        numbers[key] = _number(trained.wrapped, name, value)
        return tensors, numbers

    def _read(self) -> list[Saved]:
        newest = manifest.newest(self._directory)
        if newest is None:
            return []
        folder, said = newest
        log.info("going on from step %d: %s", said.step, folder)
        try:
            with safe_open(folder / _FILE, "pt") as file:
                metadata = file.metadata() or {}
                found = [Saved(step, {}, {}) for step in json.loads(metadata["steps"])]
                values: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                values.update(json.loads(metadata["numbers"]))
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise CheckpointCorrupt(f"{folder / _FILE} cannot be read: {error}") from error
        for key, value in values.items():
            _put(found, key, value)
        return found


def _put(found: list[Saved], key: str, value: Any) -> None:
    index, kind, rest = key.split("/", 2)
    saved = found[int(index)]
    if kind == "kept":
        saved.tensors[rest] = value
        return
    parameter, name = rest.split("/", 1)
    saved.state.setdefault(int(parameter), {})[name] = value


def _header(saved: Saved) -> tuple[int, list[Any]]:
    """What the other ranks must know to receive the tensors: the number itself in place of what is none."""
    kinds = [
        (parameter, name, _spell(value))
        for parameter, values in saved.state.items()
        for name, value in values.items()
    ]
    return saved.step, kinds


def _spell(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    return value


def _empty(kinds: list[Any]) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = {}
    for parameter, name, spelt in kinds:
        made = spelt
        if isinstance(spelt, dict):
            made = torch.empty(spelt["shape"], dtype=getattr(torch, spelt["dtype"]))
        state.setdefault(parameter, {})[name] = made
    return state


def _own(tensor: Tensor) -> Tensor:
    """A copy that shares its memory with nothing, as safetensors wants it."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _number(optimizer: Optimizer, name: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise ConfigError(
        f"{type(optimizer).__name__} keeps a {type(value).__name__} as {name!r} in its state, and checkpoints"
        " hold tensors and numbers alone: leave --checkpoint-dir out, or take another optimizer"
    )


def _kind(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

"""A rank's state beside the hub's: buffers and the residuals of compression; and frozen parameters.

A hub that steps has parameters and the optimizer's state. What else a model's `state_dict()` has, and what
compression has left out, is in the workers. When the hub takes a checkpoint, an answer of that step says so,
and each rank sends its state after the step, in a thread. Frozen parameters are alike on all ranks,
so rank 0 sends them, and only if they have changed. A worker that finishes or stops sends its state too: the
last checkpoint is written after it has left.

Not saved: hyperparameters, schedulers, a GradScaler, random state, and the position in the data. The script
has them.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from hubring.ps.client.rendezvous import KeptState, KeptStates
from hubring.ps.core.errors import CheckpointCorrupt, ConfigError, HubringError
from hubring.workers.collectives import moving
from hubring.workers.collectives.agreement import overwrite, plain_copy
from hubring.workers.communicators.base import Communicator

log = logging.getLogger(__name__)

FROZEN_BYTES = 1 << 30
"""Frozen parameters beyond this stay out of the hub's checkpoint."""
PATIENCE = 1e6
"""Seconds that a rank waits for rank 0 to take its state: at the end, rank 0 may evaluate for hours."""
LIVE_SECONDS = 60.0
"""How long a worker that joins waits for the state of a live one, which sends it after its step."""


class ModelRest(Protocol):
    """What belongs to a model beside its trained parameters."""

    inherited: bool

    def buffers(self) -> Mapping[str, Tensor]:
        """Returns the buffers that `state_dict()` has, by name."""

    def frozen(self) -> Mapping[str, Tensor]:
        """Returns the parameters by name that were frozen at the start; some may have been thawed since."""

    def settle(self) -> None:
        """Waits until the last step is complete."""


class OwnStates:
    """Sends and restores one worker's state, where the hub steps.

    Args:
        server: Stores states.
        communicator: Connects the ranks.
        saves: Whether the server writes checkpoints.
        step: Returns the completed steps.

    Attributes:
        due_at: 0 if the server wants the state after this step.
    """

    def __init__(
        self, server: KeptStates, communicator: Communicator, saves: bool, step: Callable[[], int]
    ) -> None:
        self.due_at = math.inf
        self._server, self._communicator, self._step = server, communicator, step
        self._saves = saves
        self._rest: ModelRest | None = None
        self._sending: threading.Thread | None = None
        self._lock = threading.Lock()
        self._frozen = b""
        """Digest of the frozen parameters that the server has."""
        server.follow(self._want, self._save_while_blocked)

    def _want(self) -> None:
        self.due_at = 0

    def _save_while_blocked(self) -> None:
        """Sends the state of the last step. The heartbeat's thread calls it, so it does not wait."""
        self._want()
        if self._lock.acquire(blocking=False):
            try:
                if self._sending is None or not self._sending.is_alive():
                    self._begin()
            finally:
                self._lock.release()

    # Sending.

    def save_in_passing(self) -> None:
        """Sends the state after the step that has just ended, in a thread."""
        with self._lock:
            self.close()
            if self._rest is not None:
                self._rest.settle()
            self._begin()

    def _begin(self) -> None:
        rest = self._rest
        if rest is None:  # a wish stays until there is a model
            return
        self.due_at = math.inf  # before the wish is taken: the next one can come at any time
        shares = self._server.take_wish() or self._communicator.rank == 0
        own = copy_own(rest, self._communicator)
        frozen = copies(self._small(rest.frozen())) if shares else {}
        self._sending = threading.Thread(
            target=self._send, args=(own, frozen, self._step()), name="own state", daemon=True
        )
        self._sending.start()

    def save(self) -> None:
        """Sends the state and waits until the server has it, if a checkpoint will have it."""
        if self._saves:
            self.save_in_passing()
            self.close()

    save_together = save

    def close(self) -> None:
        """Waits until everything is sent."""
        if self._sending is not None:
            self._sending.join()

    def _send(self, own: dict[str, dict[str, Tensor]], frozen: dict[str, Tensor], step: int) -> None:
        try:
            if frozen:
                content = encode({"frozen": frozen})
                digest = hashlib.sha256(content).digest()
                if digest != self._frozen:
                    self._server.send(content, step, shared=True)
                    self._frozen = digest
            self._server.send(encode(own), step, shared=False)
        except HubringError as error:
            log.warning("the server did not get the buffers of this rank at step %d: %s", step, error)

    def _small(self, frozen: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        nbytes = sum(tensor.nbytes for tensor in frozen.values())
        if nbytes <= FROZEN_BYTES:
            return frozen
        if self._frozen != b"large":
            self._frozen = b"large"
            log.warning(
                "the hub's checkpoints do not have the %d bytes of frozen parameters, only up to %d: make"
                " sure that a restarted script loads the same",
                nbytes,
                FROZEN_BYTES,
            )
        return {}

    # Restoring.

    def start(self, rest: ModelRest, attach: Callable[[], int], share: Callable[[], None]) -> int:
        """Attaches a model whose buffers and frozen parameters are then those of the job.

        Args:
            rest: Belongs to the model.
            attach: Attaches its parameters; returns the completed steps.
            share: Gives all ranks rank 0's buffers and frozen parameters.

        Returns:
            The completed steps.

        Raises:
            ConfigError: The state is of another model. The error names the first difference.
        """
        late, rank, self._rest = self._communicator.late, self._communicator.rank, rest
        if late and not rest.inherited and (rest.buffers() or rest.frozen()):
            # Before the others wait for this worker. They answer after their next step.
            self._load(rest, self._fetch(live=True), own=True, shared=True)
        step = attach()
        self._server.announce()
        if late:
            write_residuals(self._communicator, {})
            return step
        kept = self._fetch(live=False) if step and not rest.inherited else KeptState()
        self._load(rest, kept, own=rank == 0, shared=rank == 0)
        share()
        self._load(rest, kept, own=rank != 0, shared=False)
        if step and not rest.inherited:
            mine = decode(kept.own) if kept.mine else {}
            write_residuals(self._communicator, mine.get("residuals", {}))
        return step

    def _fetch(self, *, live: bool) -> KeptState:
        kept = self._server.fetch(live=live, timeout=LIVE_SECONDS)
        rest = self._rest
        if rest is not None and ((rest.buffers() and not kept.own) or (rest.frozen() and not kept.shared)):
            log.warning(
                "%s has no buffers and frozen parameters, so this worker starts with those of its script:"
                " statistics of BatchNorm, for example, start from scratch",
                "the running job" if live else "the checkpoint",
            )
        return kept

    def _load(self, rest: ModelRest, kept: KeptState, *, own: bool, shared: bool) -> None:
        if shared and kept.shared:
            fill(rest.frozen(), decode(kept.shared).get("frozen", {}), "frozen parameter")
        if own and kept.own:
            fill(rest.buffers(), decode(kept.own).get("buffers", {}), "buffer")


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies in host memory."""
    return {name: plain_copy(tensor).cpu() for name, tensor in tensors.items()}


def copy_own(rest: ModelRest, communicator: Communicator) -> dict[str, dict[str, Tensor]]:
    """Returns a copy of this rank's buffers, and of what compression has left out."""
    return {"buffers": copies(rest.buffers()), "residuals": communicator.read_residuals()}


def write_residuals(communicator: Communicator, whole: Mapping[str, Tensor]) -> None:
    """Restores what compression has left out; logs that some of it is lost."""
    if not communicator.write_residuals(whole):
        log.warning(
            "what compression left out on this rank in earlier steps is lost, and starts at zero: training"
            " goes on, but does not end in the same bytes as a run that was never interrupted"
        )


def encode(state: Mapping[str, Mapping[str, Tensor]]) -> memoryview:
    """Returns a state as bytes; none if it has no tensors."""
    if not any(state.values()):
        return memoryview(b"")
    file = io.BytesIO()
    torch.save(state, file)
    return file.getbuffer()


def decode(content: bytes) -> dict[str, Any]:
    """Returns what `encode` got.

    Raises:
        CheckpointCorrupt: It cannot be read.
    """
    if not content:
        return {}
    try:
        state = torch.load(io.BytesIO(content), weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointCorrupt(f"the saved state of this rank cannot be read: {error}") from error
    assert isinstance(state, dict)
    return state


def gather(
    models: Sequence[ModelRest], step: int, communicator: Communicator
) -> Iterator[tuple[int, memoryview]]:
    """Gives rank 0 the state of each rank, one after another, where workers step. All ranks call it.

    The other ranks return once rank 0 has taken their state, so it must take all. A lost rank fails the job,
    but not what rank 0 is about to save.
    """
    buffers = {_place(number): copies(rest.buffers()) for number, rest in enumerate(models)}
    left_out = communicator.read_residuals()
    # A ring whose members change has no residuals, and a member's place is not that of its state.
    if not (any(buffers.values()) or left_out) or communicator.members is not None:
        return iter(())
    content, name = encode({**buffers, "residuals": left_out}), f"checkpoint.{step}"
    if communicator.rank == 0:
        return _gathered(content, name, step, communicator)
    sent = torch.frombuffer(content, dtype=torch.uint8)
    with _may_be_lost(step):
        moving.send_async(sent, 0, name, communicator=communicator).wait(PATIENCE)
    return iter(())


def _gathered(
    own: memoryview, name: str, step: int, communicator: Communicator
) -> Iterator[tuple[int, memoryview]]:
    yield 0, own
    with _may_be_lost(step):
        for rank in range(1, communicator.size):
            coming = moving.recv_async(rank, name, communicator=communicator)
            yield rank, memoryview(coming.get(PATIENCE).numpy())


@contextmanager
def _may_be_lost(step: int) -> Iterator[None]:
    try:
        yield
    except HubringError as error:
        log.warning("the checkpoint of step %d does not have the buffers of all ranks: %s", step, error)


def deal(read: Callable[[int], bytes], rest: ModelRest, number: int, communicator: Communicator) -> None:
    """Restores every rank's state of one of the models. All ranks call it.

    Args:
        read: Returns what `gather` returned of a rank, on rank 0; empty if there is nothing.
        rest: Belongs to the model.
        number: Its position among those of `gather`.
        communicator: Connects the ranks.
    """
    name, own = "checkpoint.own", b""
    if communicator.rank:
        own = bytes(moving.recv(0, name, communicator=communicator).numpy())
    else:
        for rank in range(1, communicator.size):
            content = bytearray(read(rank))
            tensor = (
                torch.frombuffer(content, dtype=torch.uint8)
                if content
                else torch.empty(0, dtype=torch.uint8, device="cpu")
            )
            moving.send(tensor, rank, name, communicator=communicator)
        own = read(0)
    state = decode(own)
    if state:
        fill(rest.buffers(), state.get(_place(number), {}), "buffer")
    write_residuals(communicator, state.get("residuals", {}))


def _place(number: int) -> str:
    return f"buffers {number}"


def fill(tensors: Mapping[str, Tensor], saved: Mapping[str, Tensor], what: str) -> None:
    """Overwrites tensors with the saved ones of their names.

    Raises:
        ConfigError: One has another shape. The error names it.
    """
    for name, tensor in tensors.items():
        if name not in saved:
            log.warning("the checkpoint has no %s %s: it stays as the script made it", what, name)
        elif saved[name].shape != tensor.shape:
            raise ConfigError(
                f"the {what} {name} has shape {list(saved[name].shape)} in the checkpoint and"
                f" {list(tensor.shape)} in this model: start the script that wrote the checkpoint, or use"
                " another --checkpoint-dir"
            )
        else:
            with torch.no_grad():
                overwrite(tensor, saved[name])

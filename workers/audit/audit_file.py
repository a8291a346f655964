"""The file of an audit: layouts and steps as MessagePack, each behind its length in four bytes."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import torch
from msgspec import Struct

from hubring.ps.core.optimizer_state import state_dtype

if TYPE_CHECKING:
    Content = bytes
else:
    Content = memoryview  # what is decoded stays where it is, in the file

_LENGTH_BYTES = 4


class ModelLayout(Struct, frozen=True, kw_only=True, array_like=True, tag="layout"):
    """The parameters of one optimizer from the next step on. Lists have one entry per parameter.

    Attributes:
        trainer: Number of the optimizer in its process; its complement `~number`: other elements of the next
            step, which stand for themselves.
        rank: This worker's rank.
        optimizer: Its class in `torch.optim`; empty if it is another class.
        steps_on: Where it steps: `worker` or `server`.
        lockstep: Whether every rank takes every step.
        names: Names of the parameters.
        dtypes: Their dtypes, as `float32`.
        counts: How many of their elements are recorded.
        groups: The parameter group of each.
        keys: For every recorded element, the hub's key; empty where no order of pushes is recorded.
        wide: Whether elements are recorded as float64, else float32.
        fresh: Whether the optimizer has the state of its own steps, and of no others.
        hooked: Whether the script has hooks that may change gradients after they are recorded.
        facts: What makes a rank's gradients differ, by right, from those of the whole batch.
        held: For every recorded element, one byte: 1 if this rank holds it; empty: it holds all. Of other
            elements, only the rank's own gradient is recorded, and zeros instead of all else.
    """

    trainer: int
    rank: int
    optimizer: str
    steps_on: str
    lockstep: bool = True
    names: list[str]
    dtypes: list[str]
    counts: list[int]
    groups: list[int]
    keys: list[int] = []
    wide: bool = False
    fresh: bool = True
    hooked: bool = False
    facts: list[str] = []
    held: bytes = b""

    @property
    def stepped(self) -> list[str]:
        """The dtypes that the parameters are stepped in: a hub steps half precision in float32."""
        if self.steps_on == "worker":
            return self.dtypes
        return [str(state_dtype(getattr(torch, each))).removeprefix("torch.") for each in self.dtypes]


class AuditStep(Struct, frozen=True, array_like=True, tag="step"):
    """One step. Bytes are recorded elements, in the order of the layout's parameters.

    What `read` returns has writable views of the file's mapping.

    Attributes:
        trainer: Number of the optimizer.
        step: Completed steps, with this one.
        groups: The groups' options without parameters; None: as in the last step.
        divisor: The loss scale by which `step()` divides gradients.
        script_inside: Whether the script ran code inside `step()`, so that what stepped is not known.
        own: This rank's own gradient, as backward made it, or as the script set it without backward.
        owns: One byte per parameter: 1 if `own` has its gradient.
        arrived: The gradient when backward had returned; empty: not known.
        given: The gradient that `step()` got; empty: as `arrived`.
        gives: One byte per parameter: 1 if `step()` got a gradient; empty: not known.
        before: The parameters before the step; empty: as after the last step.
        after: The parameters after the step; empty: as before the next step.
        pushes: Of each push to an asynchronous hub: key, the pushes that were applied before it, and the
            version of the parameters in the answer.
        samples: Samples that the model trained on; -1: not recorded.
        hashes: An int64 of each, of its inputs and labels (`hubring.workers.audit.samples`).
        epoch: The DataLoader's pass that they are from, and the sampler's shard; empty: not known.
        still: Elements that, as shows now, steps do not change though they have a gradient: parameter and
            place in it (`hubring.workers.audit.unmoved_elements`).
        moved: Whether other elements than the recorded ones changed since the last step.
        state: The optimizer's state before the step, of each element by its name; NaN: none. Only in steps
            of other elements (`hubring.workers.audit.rotating_elements`).
        weight: What this rank's gradients count in the mean.
    """

    trainer: int
    step: int
    groups: list[dict[str, Any]] | None
    divisor: float
    script_inside: bool
    own: Content
    owns: Content
    arrived: Content
    given: Content
    gives: Content
    before: Content
    after: Content
    pushes: list[tuple[int, int, int]] = []
    samples: int = -1
    hashes: Content = b""
    epoch: tuple[int, ...] = ()
    still: list[tuple[int, int]] = []
    moved: bool = False
    state: dict[str, Content] = {}
    weight: float = 1.0


class AuditFile:
    """Writes the file of one worker, which it replaces."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb", buffering=1 << 20)
        self._encoder = msgspec.msgpack.Encoder()

    def write(self, entry: ModelLayout | AuditStep) -> None:
        """Adds an entry."""
        content = self._encoder.encode(entry)
        self._file.write(len(content).to_bytes(_LENGTH_BYTES, "little") + content)

    def close(self) -> None:
        """Writes what is buffered. A second call does nothing."""
        self._file.close()


def read_audit(path: Path) -> Iterator[ModelLayout | AuditStep]:
    """Yields the complete entries of a file; the last one of a killed worker can be cut off.

    Elements are not copied, so they need no memory that the kernel cannot take back. The file must not be
    changed while entries of it are in use; another one may replace it.

    Raises:
        msgspec.DecodeError: The file is damaged.
    """
    decoder = msgspec.msgpack.Decoder(ModelLayout | AuditStep)
    with path.open("rb") as file:
        if not path.stat().st_size:
            return
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))  # torch wants to write
    while len(whole) >= _LENGTH_BYTES:
        length, whole = int.from_bytes(whole[:_LENGTH_BYTES], "little"), whole[_LENGTH_BYTES:]
        if len(whole) < length:
            return
        yield decoder.decode(whole[:length])
        whole = whole[length:]

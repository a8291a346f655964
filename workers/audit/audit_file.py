"""The file of an audit: layouts and steps as MessagePack, each behind its length in four bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

_LENGTH_BYTES = 4


class ModelLayout(Struct, frozen=True, kw_only=True, array_like=True, tag="layout"):
    """The parameters of one optimizer from the next step on. Lists have one entry per parameter.

    Attributes:
        trainer: Number of the optimizer in its process.
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


class Step(Struct, frozen=True, array_like=True, tag="step"):
    """One step. Bytes are recorded elements, in the order of the layout's parameters.

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
    """

    trainer: int
    step: int
    groups: list[dict[str, Any]] | None
    divisor: float
    script_inside: bool
    own: bytes
    owns: bytes
    arrived: bytes
    given: bytes
    gives: bytes
    before: bytes
    after: bytes
    pushes: list[tuple[int, int, int]] = []


class AuditFile:
    """Writes the file of one worker, which it replaces."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb", buffering=1 << 20)
        self._encoder = msgspec.msgpack.Encoder()

    def __enter__(self) -> AuditFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, entry: ModelLayout | Step) -> None:
        """Adds an entry."""
        content = self._encoder.encode(entry)
        self._file.write(len(content).to_bytes(_LENGTH_BYTES, "little") + content)

    def close(self) -> None:
        """Writes what is buffered. A second call does nothing."""
        self._file.close()


def read(path: Path) -> Iterator[ModelLayout | Step]:
    """Yields the complete entries of a file; the last one of a killed worker can be cut off.

    Raises:
        msgspec.DecodeError: The file is damaged.
    """
    decoder = msgspec.msgpack.Decoder(ModelLayout | Step)
    with path.open("rb") as file:
        while length := file.read(_LENGTH_BYTES):
            content = file.read(int.from_bytes(length, "little"))
            if len(length) < _LENGTH_BYTES or len(content) < int.from_bytes(length, "little"):
                return
            yield decoder.decode(content)

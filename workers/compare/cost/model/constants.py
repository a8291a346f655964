"""Constants: what a machine, its wires and its processors take, as `ps-compare calibrate` measured them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.experiment.setting import Link
from hubring.workers.compare.run.outcome import write_whole

WIRES = ("shm", "zmq", "grpc", "gloo")
"""What gradients travel by; the ring's is Gloo."""


class Wire(Struct, frozen=True, kw_only=True):
    """One way for bytes from process to process, with no link between to slow it down.

    Attributes:
        alpha: Seconds from a small message's sending to its being acted upon, all wake-ups included.
        beta: Seconds a byte each way, while as many bytes come back: the pace of the slowest thread in it.
        cpu: Seconds of processor time a byte that is moved once, sender and receiver together.
        window: Bytes that one line lets be under way; None: as many as it takes.
    """

    alpha: float
    beta: float
    cpu: float
    window: float | None = None


class Constants(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured. All in seconds; rates are seconds a byte, so less is faster.

    Attributes:
        wires: By the names in WIRES.
        copy: Memory to memory.
        reduce: Adding one more gradient to a sum, a byte of it.
        apply: A step of a byte of parameters, by the optimizer's name in lower case.
        serve: What a server computes for one message whatever its size.
        cores: Of the machine that was measured.
        link: Between this host and another, where one served; None: it was not measured.
        compute: A step of the job on one worker with its share of the batch; None: not measured.
        spread: Least and most of what was measured, by the figure's name, as `zmq.alpha`.
        machine: What it was measured on, with versions.
        date: When, ISO 8601.
    """

    wires: Mapping[str, Wire]
    copy: float
    reduce: float
    apply: Mapping[str, float]
    serve: float
    cores: int
    link: Link | None = None
    compute: float | None = None
    spread: Mapping[str, tuple[float, float]] = {}
    machine: Mapping[str, str | int] = {}
    date: str = ""

    def wire(self, name: str) -> Wire:
        """The wire of that name.

        Raises:
            UsageError: It was not measured.
        """
        if name not in self.wires:
            known = ", ".join(self.wires) or "none"
            raise UsageError(f"the calibration knows no wire {name!r}; it has {known}: calibrate again")
        return self.wires[name]

    def step(self, optimizer: str) -> float:
        """Seconds a byte of that optimizer's step.

        Raises:
            UsageError: It was not measured.
        """
        if optimizer.lower() not in self.apply:
            known = ", ".join(self.apply)
            raise UsageError(f"the calibration knows no optimizer {optimizer!r}; it has {known}")
        return self.apply[optimizer.lower()]

    def write(self, path: Path) -> None:
        """Writes them as a JSON file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def read(path: Path) -> Constants:
    """The constants that `Constants.write` left.

    Raises:
        UsageError: There is no such file, or something else is in it.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Constants)
    except (OSError, msgspec.DecodeError, UsageError) as cause:
        raise UsageError(
            f"{path} holds no calibration ({cause}); make one: ps-compare calibrate --out {path}"
        ) from cause

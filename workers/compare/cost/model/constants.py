"""Constants: costs of a machine's wires and processors, as measured by `ps-compare calibrate`."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path

import msgspec
from msgspec import Struct

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.cost.cluster.cluster import Cluster
from hubring.workers.compare.experiment.setting import Link
from hubring.workers.compare.run.outcome import write_whole

LINE_BYTES, PAYLOAD_BYTES = 1514, 1448
"""A full Ethernet frame, and its TCP payload with timestamps."""
WIRES = ("shm", "zmq", "grpc", "gloo")
"""Wires of gradients; the ring uses Gloo."""


class Wire(Struct, frozen=True, kw_only=True):
    """A wire between two processes, without a link that slows it down.

    Attributes:
        alpha: Seconds from sending a small message to handling it, with all wake-ups.
        beta: Seconds a byte each way, with as many bytes in both directions: the speed of its slowest thread.
        cpu: Processor seconds a byte that is moved once, sender and receiver together.
        window: Most bytes in flight on one connection; None: no limit.
    """

    alpha: float
    beta: float
    cpu: float
    window: float | None = None


class Constants(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured constants. All are seconds; rates are seconds a byte, so less is faster.

    Attributes:
        wires: By the names in WIRES.
        copy: Copying a byte in memory.
        reduce: Adding a byte of one more gradient to a sum.
        apply: Stepping a byte of parameters, by the optimizer's name in lower case.
        serve: Compute of a server for one message of any size.
        cores: Number of cores of the machine.
        link: Link to another host that served; None: not measured.
        compute: A step of the job on one worker with its share of the batch; None: not measured.
        spread: Minimum and maximum of the measurements, by the figure's name, such as `zmq.alpha`.
        machine: Description of the machine, with versions.
        date: Date of the measurement, ISO 8601.
        cluster: Nodes of several GPUs, for rows of NCCL; None: unknown.
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
    cluster: Cluster | None = None

    def wire(self, name: str) -> Wire:
        """Returns the wire with that name.

        Raises:
            UsageError: It was not measured.
        """
        if name not in self.wires:
            known = ", ".join(self.wires) or "none"
            raise UsageError(f"the calibration has no wire {name!r}, only {known}; calibrate again")
        return self.wires[name]

    def fastest(self, name: str) -> float:
        """Returns the bits per second up to which the wire was calibrated, with headers; infinite: unknown.

        A faster link was not seen to be used: the I/O thread of this host is slower than it.
        """
        beta = self.wire(name).beta
        threads = 8 / beta * LINE_BYTES / PAYLOAD_BYTES if beta else inf
        measured = None if self.link is None else self.link.rate
        return threads if measured is None else max(threads, measured)

    def step(self, optimizer: str) -> float:
        """Returns seconds a byte of that optimizer's step.

        Raises:
            UsageError: It was not measured.
        """
        if optimizer.lower() not in self.apply:
            known = ", ".join(self.apply)
            raise UsageError(f"the calibration has no optimizer {optimizer!r}; expected one of {known}")
        return self.apply[optimizer.lower()]

    def write(self, path: Path) -> None:
        """Writes the constants atomically as a JSON file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def read(path: Path) -> Constants:
    """Reads constants that `Constants.write` wrote.

    Raises:
        UsageError: The file does not exist or has other content.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Constants)
    except (OSError, msgspec.DecodeError, UsageError) as cause:
        raise UsageError(
            f"{path} is not a calibration ({cause}); to make one, run: ps-compare calibrate --out {path}"
        ) from cause

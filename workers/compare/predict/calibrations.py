"""Calibrations to predict with: a file of `calibrate`, the output of nccl-tests, or one that is bundled.

Bundled: `host`, two cores that ran Hubring's own calibration, and clusters whose sweeps of nccl-tests were
published; each of their tables names its source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.plan import setting
from hubring.workers.compare.plan.setting import LINE_BYTES, PAYLOAD_BYTES, Link
from hubring.workers.compare.predict.nccl import Cluster, Level, SweepTable
from hubring.workers.compare.run.outcome import write_whole
from hubring.workers.peers.nccl_tests import NcclSweep, read_nccl_output

WIRES = ("shm", "zmq", "grpc", "gloo")
"""Wires of gradients; the ring uses Gloo."""


class WireCosts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A wire between two processes, without a link that slows it down.

    Attributes:
        alpha: Seconds from sending a small message to handling it, with all wake-ups.
        beta: Seconds a byte each way, with as many bytes in both directions: the speed of its slowest thread.
        cpu: Processor seconds a byte that is moved once, sender and receiver together.
        window: In older files, always null; another value is refused.
    """

    alpha: float
    beta: float
    cpu: float
    window: None = None


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

    wires: Mapping[str, WireCosts]
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

    def wire(self, name: str) -> WireCosts:
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


def read_constants(path: Path) -> Constants:
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


FILE = Path("calibration.json")
HOST, CLUSTERS = "host", ("h100", "dgx-a100")
BUNDLED = (HOST, *CLUSTERS)
GPUS = 8
"""GPUs of a node where the output of nccl-tests does not list its hosts."""
INTRA = {
    "nvlink": Level(
        rate=368.76e9, alpha=2.2e-6, fill=7e-9, source="https://github.com/NVIDIA/nccl-tests/issues/309"
    ),
    "pcie": Level(
        rate=40e9,
        alpha=2.2e-6,
        fill=7e-9,
        source="https://docs.alayanew.com/en/docs/tech-blog/2026-05-06-nccl-tests",
    ),
}
"""Inside a node of eight H100: a ring over NVLink without a switch that sums, and PCI Express 5.0 (35 to 45
GB/s). Their latency and filling are those of the bundled `h100`."""


def find_calibration(given: str | None) -> tuple[str, Constants]:
    """Returns the name of a calibration, and its constants.

    Args:
        given: Name of a bundled calibration, or a file; None: `calibration.json` of the current folder, else
            the bundled `host`.

    Raises:
        UsageError: The file does not exist, or is no calibration.
    """
    name = given or (str(FILE) if FILE.exists() else HOST)
    return name, _bundled(name) if name in BUNDLED else _of_file(Path(name))


def with_nodes(
    constants: Constants, gpus: int | None, intra: str | None, rate: object, latency: object
) -> Constants:
    """Returns the constants with another cluster where an option describes it; else the same constants.

    Sweeps say nothing about other links, so a cluster with another level has none. What no option says is as
    in the bundled `h100`.

    Args:
        constants: The calibration.
        gpus: GPUs of a node.
        intra: Links inside a node: a name in INTRA, or a rate.
        rate: Bits per second of a node's links to other nodes, all together, or text such as 25gbit.
        latency: Seconds between two nodes, or text such as 20us.

    Raises:
        UsageError: A value is invalid, or `intra` is neither a name nor a rate.
    """
    cluster = constants.cluster
    if gpus is None and intra is None and (cluster is None or (rate is None and latency is None)):
        return constants
    base = cluster or _cluster("h100")
    inside = base.inside if intra is None else _intra(intra, base)
    between = base.between
    if rate is not None or latency is not None:
        several = base.between is not None or any(table.nodes > 1 for table in base.tables)
        known = (base if several else _cluster("h100")).among()
        between = replace(
            known,
            rate=known.rate if rate is None else setting.read_rate(rate) / 8 * PAYLOAD_BYTES / LINE_BYTES,
            alpha=known.alpha if latency is None else setting.read_seconds(latency),
        )
    if (inside, between) != (base.inside, base.between):
        inside, between = inside or base.within(), between or base.among()
        own = base.ring_rate if intra is None else None
        base = replace(base, tables=[], ring_rate=own, inside=inside, between=between)
    return replace(constants, cluster=replace(base, gpus=gpus or base.gpus))


def link_of(constants: Constants) -> Link | None:
    """Returns the link of each host, or of each node of a cluster; None: unknown."""
    cluster = constants.cluster
    if constants.link is not None or cluster is None:
        return constants.link
    if cluster.between is None and all(table.nodes == 1 for table in cluster.tables):
        return None
    return Link(rate=cluster.among().rate * 8 * LINE_BYTES / PAYLOAD_BYTES)


def _bundled(name: str) -> Constants:
    host = read_constants(_path(HOST))
    return host if name == HOST else replace(host, cluster=_cluster(name))


def _path(name: str) -> Path:
    return Path(__file__).parent / "bundled" / f"{name}.json"


def _cluster(name: str) -> Cluster:
    return msgspec.json.decode(_path(name).read_bytes(), type=Cluster)


def _of_file(path: Path) -> Constants:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        if text.lstrip().startswith("{"):
            return read_constants(path)
        return replace(_bundled(HOST), cluster=_swept(path.name, read_nccl_output(text)))
    except (OSError, UsageError) as cause:
        raise UsageError(
            f"{path} is not a calibration ({cause}); expected one of {', '.join(BUNDLED)}, the output of"
            f" nccl-tests, or a file of: ps-compare calibrate --out {path}"
        ) from cause


def _swept(name: str, sweeps: Sequence[NcclSweep]) -> Cluster:
    """Returns the cluster of these outputs of nccl-tests."""
    listed = [sweep.ranks // sweep.nodes for sweep in sweeps if sweep.nodes is not None]
    gpus = max(listed, default=min(GPUS, min(sweep.ranks for sweep in sweeps)))
    tables = []
    for sweep in sweeps:
        nodes = sweep.nodes or max(1, sweep.ranks // gpus)
        rows = [(size, 1e6 * seconds) for size, seconds in sweep.rows]
        tables.append(SweepTable(nodes=nodes, gpus=sweep.ranks // nodes, rows=rows))
    return Cluster(name=name, gpus=gpus, tables=tables)


def _intra(text: str, base: Cluster) -> Level:
    if text in INTRA:
        return INTRA[text]
    try:
        rate = setting.read_rate(text) / 8
    except UsageError as cause:
        raise UsageError(f"--intra {text}: expected nvlink, pcie, or a rate such as 900gbit") from cause
    known = base.inside or INTRA["nvlink"]
    return Level(rate=rate, alpha=known.alpha, fill=known.fill)

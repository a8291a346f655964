"""Calibrations to predict with: a file of `calibrate`, the output of nccl-tests, or one that is bundled.

Bundled: `host`, two cores that ran Hubring's own calibration, and clusters whose sweeps of nccl-tests were
published; each of their tables names its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.cost.cluster.cluster import Cluster, Level, Table
from hubring.workers.compare.cost.model.constants import LINE_BYTES, PAYLOAD_BYTES, Constants, read
from hubring.workers.compare.experiment import quantity
from hubring.workers.compare.experiment.setting import Link
from hubring.workers.compare.result.nccl_output import Sweep, read_output

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


class Calibration(Struct, frozen=True, kw_only=True):
    """Constants, and where they are from.

    Attributes:
        constants: The constants.
        name: Name of the bundled calibration, or the file; empty: measured now.
        bundled: Whether it is bundled.
    """

    constants: Constants
    name: str = ""
    bundled: bool = False


def find(given: str | None) -> Calibration:
    """Returns the calibration with that name.

    Args:
        given: Name of a bundled calibration, or a file; None: `calibration.json` of the current folder, else
            the bundled `host`.

    Raises:
        UsageError: The file does not exist, or is no calibration.
    """
    if given is None:
        given = str(FILE) if FILE.exists() else HOST
    if given in BUNDLED:
        return Calibration(constants=_bundled(given), name=given, bundled=True)
    return Calibration(constants=_of_file(Path(given)), name=given)


def with_nodes(
    constants: Constants, gpus: int | None, intra: str | None, rate: float | None, latency: float | None
) -> Constants:
    """Returns the constants with another cluster where an option describes it; else the same constants.

    Sweeps say nothing about other links, so a cluster with another level has none. What no option says is as
    in the bundled `h100`.

    Args:
        constants: The calibration.
        gpus: GPUs of a node.
        intra: Links inside a node: a name in INTRA, or a rate.
        rate: Bits per second of a node's links to other nodes, all together.
        latency: Seconds between two nodes.

    Raises:
        UsageError: `intra` is neither a name nor a rate.
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
        goodput = known.rate if rate is None else rate / 8 * PAYLOAD_BYTES / LINE_BYTES
        between = replace(known, rate=goodput, alpha=known.alpha if latency is None else latency)
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
    host = read(_path(HOST))
    return host if name == HOST else replace(host, cluster=_cluster(name))


def _path(name: str) -> Path:
    return Path(__file__).parent / "bundled" / f"{name}.json"


def _cluster(name: str) -> Cluster:
    return msgspec.json.decode(_path(name).read_bytes(), type=Cluster)


def _of_file(path: Path) -> Constants:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        if text.lstrip().startswith("{"):
            return read(path)
        return replace(_bundled(HOST), cluster=_swept(path.name, read_output(text)))
    except (OSError, UsageError) as cause:
        raise UsageError(
            f"{path} is not a calibration ({cause}); expected one of {', '.join(BUNDLED)}, the output of"
            f" nccl-tests, or a file of: ps-compare calibrate --out {path}"
        ) from cause


def _swept(name: str, sweeps: Sequence[Sweep]) -> Cluster:
    """Returns the cluster of these outputs of nccl-tests."""
    listed = [sweep.ranks // sweep.nodes for sweep in sweeps if sweep.nodes is not None]
    gpus = max(listed, default=min(GPUS, min(sweep.ranks for sweep in sweeps)))
    tables = []
    for sweep in sweeps:
        nodes = sweep.nodes or max(1, sweep.ranks // gpus)
        rows = [(size, 1e6 * seconds) for size, seconds in sweep.rows]
        tables.append(Table(nodes=nodes, gpus=sweep.ranks // nodes, rows=rows))
    return Cluster(name=name, gpus=gpus, tables=tables)


def _intra(text: str, base: Cluster) -> Level:
    if text in INTRA:
        return INTRA[text]
    try:
        rate = quantity.rate(text) / 8
    except UsageError as cause:
        raise UsageError(f"--intra {text}: expected nvlink, pcie, or a rate such as 900gbit") from cause
    known = base.inside or INTRA["nvlink"]
    return Level(rate=rate, alpha=known.alpha, fill=known.fill)

"""Allreduces of n = m g GPUs on m nodes: one ring, trees between nodes, or two levels.

M: bytes; Bi: bytes per second of a GPU inside its node, each way; Be: of a node between nodes, each way.

| algorithm | inside a node | between nodes | source |
| --- | --- | --- | --- |
| ring | 2(n-1)/n M/Bi | 2(n-1)/n M/Be | Patarasuk and Yuan, JPDC 2009 |
| tree | as below, or 2 M/Bi in a chain | 2 M/Be; with two nodes M/Be | Sanders et al., ParCo 2009 |
| two levels | 2(g-1)/g M/Bi | 2(m-1)/m M/Be | reduce-scatter, allreduce of M/g, allgather |

Chunks pass both levels at the same time, so the slower level decides. All GPUs of a node together reach Be,
each over its own share of the node's links. Trees between two nodes move half of what they move between
more, because no node passes on what it received: nccl-tests then shows a busbw above the links' rate.
"""

from __future__ import annotations

from math import log, sqrt
from typing import Literal, NamedTuple

from numpy import interp

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.cost.cluster.cluster import Cluster, Level, depth

Algorithm = Literal["nccl", "ring", "tree", "two-level"]
"""`nccl`: the faster of ring and tree, as NCCL chooses, times what sweeps took of that; so what was measured,
where a sweep has the shape and the size."""


class Allreduce(NamedTuple):
    """Seconds of one allreduce, by what takes them; the two levels work at the same time."""

    inside: float
    between: float
    latency: float

    @property
    def seconds(self) -> float:
        return max(self.inside, self.between) + self.latency


class Shape(NamedTuple):
    """Nodes, and GPUs of each."""

    nodes: int
    gpus: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    @staticmethod
    def of(workers: int, gpus: int) -> Shape:
        """Returns the shape of so many workers, one on each GPU.

        Raises:
            UsageError: The last node would have fewer GPUs than the others.
        """
        if workers <= gpus:
            return Shape(1, workers)
        if workers % gpus:
            raise UsageError(
                f"{workers} workers on nodes of {gpus} GPUs leave a part of a node; expected a multiple of"
                f" {gpus}, or fewer than {gpus}"
            )
        return Shape(workers // gpus, gpus)


def allreduce(cluster: Cluster, algorithm: Algorithm, shape: Shape, nbytes: float) -> Allreduce:
    """Returns the time of an allreduce of `nbytes`.

    Raises:
        UsageError: The cluster's calibration lacks a level.
    """
    if shape.ranks == 1:
        return Allreduce(0.0, 0.0, 0.0)
    if algorithm != "nccl":
        return _FORMULAS[algorithm](cluster, shape, nbytes)
    best = min((_FORMULAS[name](cluster, shape, nbytes) for name in _CHOSEN), key=_seconds)
    share = _share_of_sweeps(cluster, shape, nbytes)
    return Allreduce(best.inside * share, best.between * share, best.latency * share)


def _share_of_sweeps(cluster: Cluster, shape: Shape, nbytes: float) -> float:
    """Returns the time that sweeps took, as a share of the formula's. 1 where no sweep is comparable.

    Between two sweeps the share follows the logarithm of the nodes, so that a larger cluster is not faster
    only because nothing was measured with a smaller one. One node says nothing about several, and two say
    nothing about more, because their trees move half of the bytes.
    """
    shares = {
        nodes: known / min(_FORMULAS[name](cluster, Shape(nodes, gpus), nbytes).seconds for name in _CHOSEN)
        for nodes, gpus in cluster.swept
        if gpus == shape.gpus and min(nodes, 3) == min(shape.nodes, 3)
        if (known := cluster.measured(nodes, gpus, nbytes)) is not None
    }
    if not shares:
        return 1.0
    return float(interp(log(shape.nodes), [log(nodes) for nodes in shares], list(shares.values())))


def _seconds(found: Allreduce) -> float:
    return found.seconds


def _ring(cluster: Cluster, shape: Shape, nbytes: float) -> Allreduce:
    inner, outer = cluster.within(), _outer(cluster, shape)
    hops, crossing = 2 * (shape.ranks - 1), 2 * (shape.nodes - 1)
    moved = _share(shape.ranks) * nbytes
    return Allreduce(
        inside=moved / (cluster.ring_rate or inner.rate),
        between=moved / outer.rate if outer else 0.0,
        latency=(hops - crossing) * inner.alpha
        + (crossing * outer.alpha if outer else 0.0)
        + _fill(inner, outer, shape, nbytes),
    )


def _tree(cluster: Cluster, shape: Shape, nbytes: float) -> Allreduce:
    inner, outer = cluster.within(), _outer(cluster, shape)
    chain = 2 * nbytes / inner.rate
    summing = cluster.ring_rate is not None and cluster.ring_rate < inner.rate
    inside = _share(shape.gpus) * nbytes / inner.rate if summing or shape.nodes == 1 else chain
    times = 1 if shape.nodes == 2 else 2
    return Allreduce(
        inside=inside if shape.gpus > 1 else 0.0,
        between=times * nbytes / outer.rate if outer else 0.0,
        latency=_levels(inner, outer, shape) + _fill(inner, outer, shape, nbytes),
    )


def _two_level(cluster: Cluster, shape: Shape, nbytes: float) -> Allreduce:
    inner, outer = cluster.within(), _outer(cluster, shape)
    hops = 2 * (shape.nodes - 1)
    return Allreduce(
        inside=_share(shape.gpus) * nbytes / inner.rate,
        between=_share(shape.nodes) * nbytes / outer.rate if outer else 0.0,
        latency=2 * (shape.gpus - 1) * inner.alpha
        + (hops * outer.alpha if outer else 0.0)
        + _fill(inner, outer, shape, nbytes),
    )


_FORMULAS = {"ring": _ring, "tree": _tree, "two-level": _two_level}
_CHOSEN = ("ring", "tree")
"""Algorithms that NCCL chooses from."""


def _share(ranks: int) -> float:
    """Returns what each of `ranks` sends in a bandwidth-optimal allreduce, as a share of the bytes."""
    return 2 * (ranks - 1) / ranks


def _outer(cluster: Cluster, shape: Shape) -> Level | None:
    return cluster.among() if shape.nodes > 1 else None


def _levels(inner: Level, outer: Level | None, shape: Shape) -> float:
    inside = 2 * (shape.gpus - 1) * inner.alpha
    return inside + (2 * depth(shape.nodes) * outer.alpha if outer else 0.0)


def _fill(inner: Level, outer: Level | None, shape: Shape, nbytes: float) -> float:
    """Returns the time in which the pipelines of chunks fill."""
    inside = inner.fill if shape.gpus > 1 else 0.0
    return (inside + (outer.fill if outer else 0.0)) * sqrt(nbytes)

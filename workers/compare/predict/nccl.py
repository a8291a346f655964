"""Allreduces of n = m g GPUs on m nodes, from what nccl-tests measured: one ring, trees, or two levels.

M: bytes; Bi: bytes per second of a GPU inside its node, each way; Be: of a node between nodes, each way.

| algorithm | inside a node | between nodes | source |
| --- | --- | --- | --- |
| ring | 2(n-1)/n M/Bi | 2(n-1)/n M/Be | Patarasuk and Yuan, JPDC 2009 |
| tree | 2(g-1)/g M/Bi | 2 M/Be; with two nodes M/Be | Sanders et al., ParCo 2009 |
| two levels | 2(g-1)/g M/Bi | 2(m-1)/m M/Be | reduce-scatter, allreduce of M/g, allgather |

Chunks pass both levels at the same time, so the slower level decides. All GPUs of a node together reach Be,
each over its own share of the node's links. Trees between two nodes move half of what they move between
more, because no node passes on what it received: nccl-tests then shows a busbw above the links' rate.

The levels follow from sweeps: t(M) = alpha + fill sqrt(M) + M / rate. An allreduce sends chunks through a
pipeline. With the best chunk its time is alpha + 2 sqrt(hops alpha M / rate) + M / rate (Thakur et al.,
IJHPCA 2005), so the middle term grows with the square root of the size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, exp, inf, log, log2, sqrt
from typing import Literal, NamedTuple

import numpy as np
from msgspec import Struct

from hubring.ps.core.errors import UsageError

BEYOND = 1.1
"""Factor by which a fitted rate may exceed the measured one."""
Rows = Sequence[tuple[int, float]]
"""Bytes and seconds, by rising size."""


class AllreduceCurve(Struct, frozen=True):
    """Three terms of an allreduce's time.

    Attributes:
        alpha: Seconds of the smallest message.
        fill: Seconds per square root of a byte, in which a pipeline fills and drains.
        rate: Bytes per second of the largest message (nccl-tests' algbw).
    """

    alpha: float
    fill: float
    rate: float

    def seconds(self, nbytes: float) -> float:
        return self.alpha + self.fill * sqrt(nbytes) + nbytes / self.rate


def fitted(rows: Rows) -> AllreduceCurve:
    """Returns the curve with the least relative errors; no term is negative. One row gives only a rate.

    The rate is at most `BEYOND` times that of the largest size, or of what the two largest sizes differ by: a
    sweep that ends early looks as if it would go on rising.
    """
    sizes = np.array([size for size, _ in rows], float)
    times = np.array([seconds for _, seconds in rows], float)
    terms = np.stack([np.ones_like(sizes), np.sqrt(sizes)]) / times
    reached = float((sizes / times).max())
    best, least = AllreduceCurve(0.0, 0.0, reached), np.inf
    most = BEYOND * max(reached, _last_rate(rows))
    for rate in np.linspace(reached, most, 21).tolist() if len(rows) > 1 else ():
        wanted = 1 - sizes / rate / times
        for chosen in ([], [0], [1], [0, 1]):
            found = np.linalg.lstsq(terms[chosen].T, wanted, rcond=None)[0]
            error = float(np.square(terms[chosen].T @ found - wanted).sum())
            if (found >= 0).all() and error < least:
                values = dict(zip(chosen, found.tolist(), strict=True))
                least, best = error, AllreduceCurve(values.get(0, 0.0), values.get(1, 0.0), rate)
    return best


def _last_rate(rows: Rows) -> float:
    """Returns the bytes per second by which the largest size is larger; 0 if it is not slower."""
    (small, fast), (large, slow) = rows[-2:] if len(rows) > 1 else ((0, 0.0), *rows)
    return (large - small) / (slow - fast) if slow > fast else 0.0


def measured(rows: Rows, nbytes: float) -> float | None:
    """Returns the seconds between two measured sizes, linear in the logarithms; None outside of them."""
    for (small, fast), (large, slow) in pairwise(rows):
        if small <= nbytes <= large:
            share = log(nbytes / small) / log(large / small)
            return exp(log(fast) + share * log(slow / fast))
    return None


NCCL, RING = "nccl", "ring"


class ClusterShape(NamedTuple):
    """Nodes, and GPUs of each."""

    nodes: int
    gpus: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    @staticmethod
    def of(workers: int, gpus: int) -> ClusterShape:
        """Returns the shape of so many workers, one on each GPU.

        Raises:
            UsageError: The last node would have fewer GPUs than the others.
        """
        if workers <= gpus:
            return ClusterShape(1, workers)
        if workers % gpus:
            raise UsageError(
                f"{workers} workers on nodes of {gpus} GPUs leave a part of a node; expected a multiple of"
                f" {gpus}, or fewer than {gpus}"
            )
        return ClusterShape(workers // gpus, gpus)


class SweepTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published or measured sweep over sizes.

    Attributes:
        nodes: Number of nodes.
        gpus: GPUs on each node.
        rows: Bytes and microseconds of an allreduce, out of place, by rising size.
        algorithm: `ring` if NCCL was told to use it; `nccl`: NCCL chose.
        source: Where it was published, as a URL; empty: measured by the user.
        about: Hardware and options.
    """

    nodes: int
    gpus: int
    rows: list[tuple[int, float]]
    algorithm: str = NCCL
    source: str = ""
    about: str = ""

    @property
    def shape(self) -> ClusterShape:
        return ClusterShape(self.nodes, self.gpus)

    @property
    def largest(self) -> int:
        """Bytes of the largest size."""
        return self.rows[-1][0]

    @property
    def seconds(self) -> list[tuple[int, float]]:
        """Bytes and seconds."""
        return [(size, micro / 1e6) for size, micro in self.rows]


class Level(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network inside of a node, or between nodes.

    Attributes:
        rate: Bytes per second each way: of a GPU inside, of a node between.
        alpha: Seconds of one hop of a small message.
        fill: Seconds per square root of a byte, in which a pipeline of chunks fills. It does not grow with
            the number of nodes: eight nodes of H100 took no longer to fill than four.
        source: Where the rate was published, as a URL.
        about: Hardware, and where the other figures are from.
    """

    rate: float
    alpha: float = 0.0
    fill: float = 0.0
    source: str = ""
    about: str = ""


class Cluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes of several GPUs.

    Attributes:
        name: Name for people.
        gpus: GPUs of a node.
        tables: Measured sweeps.
        ring_rate: Bytes per second of a ring inside a node; None: that of the sweep of one node. A switch
            that sums (NVLink SHARP) is faster than a ring.
        between: Between nodes; None: follows from the sweeps of several nodes.
        inside: Inside a node; None: follows from the sweeps of one node.
    """

    name: str
    gpus: int
    tables: list[SweepTable] = []
    ring_rate: float | None = None
    inside: Level | None = None
    between: Level | None = None

    def measured(self, shape: ClusterShape, nbytes: float) -> float | None:
        """Returns the seconds that NCCL took for this size, from a sweep of this shape."""
        known = (each.seconds for each in self.tables if (each.shape, each.algorithm) == (shape, NCCL))
        return measured(next(known, ()), nbytes)

    @property
    def sources(self) -> list[str]:
        """Where the sweeps and levels were published."""
        named = [table.source for table in self.tables]
        named += [level.source for level in (self.inside, self.between) if level is not None]
        return list(dict.fromkeys(filter(None, named)))

    def covers(self, shape: ClusterShape, nbytes: float) -> bool:
        """Whether sweeps of at least as many nodes, with as many GPUs on each, have this size."""
        return any(
            table.nodes >= shape.nodes
            and table.gpus == shape.gpus
            and (table.nodes > 1) == (shape.nodes > 1)
            and table.rows[0][0] <= nbytes <= table.largest
            for table in self.tables
        )

    def within(self) -> Level:
        """Returns the level inside a node.

        Raises:
            UsageError: No sweep of one node was measured.
        """
        if self.inside is not None:
            return self.inside
        table = max(
            (each for each in self.tables if each.nodes == 1), key=lambda each: each.largest, default=None
        )
        if table is None or table.gpus < 2:
            raise UsageError(
                f"calibration {self.name} has no sweep of one node with several GPUs; add `--intra`, or the"
                " output of all_reduce_perf on one node to the file"
            )
        curve, hops = fitted(table.seconds), 2 * (table.gpus - 1)
        return Level(rate=curve.rate * _share(table.gpus), alpha=curve.alpha / hops, fill=curve.fill)

    def among(self) -> Level:
        """Returns the level between nodes.

        With two nodes a tree moves half of what it moves with more nodes, so sweeps of more nodes come first.

        Raises:
            UsageError: No sweep of several nodes was measured.
        """
        if self.between is not None:
            return self.between
        tables = [each for each in self.tables if each.nodes > 1]
        if not tables:
            raise UsageError(
                f"calibration {self.name} has no sweep of several nodes; add `--rate` with the rate of a"
                " node's links, or the output of all_reduce_perf on several nodes to the file"
            )
        several = [each for each in tables if each.nodes > 2 or each.algorithm == RING] or tables
        # The largest size of the most nodes decides; the smallest sizes show the latency.
        largest = max(several, key=lambda each: (each.nodes, each.largest))
        detailed = min(
            (each for each in several if each.nodes > 2), key=lambda each: each.rows[0][0], default=largest
        )
        curve, inner = fitted(detailed.seconds), self.within()
        return Level(
            rate=fitted(largest.seconds).rate * _share(largest.shape.ranks),
            # What a sweep takes longer than a node alone, for each hop of a tree.
            alpha=max(0.0, curve.alpha - 2 * (detailed.gpus - 1) * inner.alpha) / (2 * depth(detailed.nodes)),
            fill=max(0.0, curve.fill - inner.fill),
        )


def depth(nodes: int) -> int:
    """Returns the hops from the root of a binary tree of nodes to its leaves."""
    return ceil(log2(nodes)) if nodes > 1 else 0


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


def allreduce(cluster: Cluster, algorithm: Algorithm, shape: ClusterShape, nbytes: float) -> Allreduce:
    """Returns the time of an allreduce of `nbytes`.

    Raises:
        UsageError: The cluster's calibration lacks a level.
    """
    if shape.ranks == 1:
        return Allreduce(0.0, 0.0, 0.0)
    if algorithm != "nccl":
        return _formula(cluster, algorithm, shape, nbytes)
    best = _faster(cluster, shape, nbytes)
    share = _share_of_sweeps(cluster, shape, nbytes)
    return Allreduce(best.inside * share, best.between * share, best.latency * share)


def _share_of_sweeps(cluster: Cluster, shape: ClusterShape, nbytes: float) -> float:
    """Returns the time that sweeps took, as a share of the formula's. 1 where no sweep is comparable.

    Between two sweeps the share follows the logarithm of the nodes, so that a larger cluster is not faster
    only because nothing was measured with a smaller one. One node says nothing about several, and two say
    nothing about more, because their trees move half of the bytes.
    """
    shares = {
        swept.nodes: known / _faster(cluster, swept, nbytes).seconds
        for swept in sorted({table.shape for table in cluster.tables})
        if swept.gpus == shape.gpus and min(swept.nodes, 3) == min(shape.nodes, 3)
        if (known := cluster.measured(swept, nbytes)) is not None
    }
    if not shares:
        return 1.0
    return float(np.interp(log(shape.nodes), [log(nodes) for nodes in shares], list(shares.values())))


def _faster(cluster: Cluster, shape: ClusterShape, nbytes: float) -> Allreduce:
    """Returns the faster of ring and tree, which NCCL chooses from."""
    both = (_formula(cluster, "ring", shape, nbytes), _formula(cluster, "tree", shape, nbytes))
    return min(both, key=lambda each: each.seconds)


def _formula(cluster: Cluster, algorithm: Algorithm, shape: ClusterShape, nbytes: float) -> Allreduce:
    nodes, gpus, ranks = *shape, shape.ranks
    inner, outer = cluster.within(), cluster.among() if nodes > 1 else Level(rate=inf)
    around = 2 * (nodes - 1)
    # Bytes inside and between, as shares of all; hops inside and between.
    inside, between, hops, crossing = {
        "ring": (_share(ranks), _share(ranks), 2 * (ranks - 1) - around, around),
        "tree": (_share(gpus), 1 if nodes == 2 else 2, 2 * (gpus - 1), 2 * depth(nodes)),
        "two-level": (_share(gpus), _share(nodes), 2 * (gpus - 1), around),
    }[algorithm]
    # The time in which the pipelines of chunks fill.
    fill = ((inner.fill if gpus > 1 else 0.0) + outer.fill) * sqrt(nbytes)
    return Allreduce(
        inside=inside * nbytes / ((algorithm == "ring" and cluster.ring_rate) or inner.rate),
        between=between * nbytes / outer.rate,
        latency=hops * inner.alpha + crossing * outer.alpha + fill,
    )


def _share(ranks: int) -> float:
    """Returns what each of `ranks` sends in a bandwidth-optimal allreduce, as a share of the bytes."""
    return 2 * (ranks - 1) / ranks
